"""A group: the n episodes of one task draw, and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..env import Task
from ..trajectory import Row
from .episode import EpisodeResult


@dataclass
class Group:
    """n episodes of one draw. `version` = the engines' at dispatch; `outcome` is set once, when it is consumed;
    `ended` = its rank among the groups that have finished; `began` = when, on the monotonic clock.
    """

    draw: int
    task: Task
    n: int
    version: int
    results: list[EpisodeResult] = field(default_factory=list)
    outcome: str = ""
    ended: int = 0
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)
    _versions: tuple[int, int] | None = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return len(self.results) == self.n

    @property
    def valid(self) -> list[EpisodeResult]:
        """Members with a verdict, by sample index."""
        return sorted((result for result in self.results if result.has_verdict), key=lambda result: result.sample)

    @property
    def rows(self) -> list[Row]:
        """Rows of the members with a verdict; the rows of one rollout stand together, in order."""
        return [row for result in self.valid for row in result.rows]

    def scores(self) -> list[float]:
        """Raw scores of the members with a verdict, before any shaping."""
        return [float(result.score) for result in self.valid if result.score is not None]

    def versions(self) -> tuple[int, int]:
        """(oldest, newest) weight version among the trained tokens of a finished group; the dispatch's where there are none."""
        if self._versions is None:
            sampled = [row.versions[row.loss_mask] for row in self.rows if row.loss_mask.any()]
            spans = [(int(versions.min()), int(versions.max())) for versions in sampled] or [
                (self.version, self.version)
            ]
            self._versions = (min(low for low, _ in spans), max(high for _, high in spans))
        return self._versions


@dataclass
class Batch:
    """Groups to train together, by draw, and the groups that ended since the last batch without training."""

    groups: list[Group]
    dropped: list[Group] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]
