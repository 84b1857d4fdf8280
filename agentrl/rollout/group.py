"""A group: the n episodes of one task draw, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..env import Task
from ..trajectory import Row
from .episode import EpisodeResult


@dataclass
class Group:
    """n episodes of one draw. `version` = the engines' at dispatch; `outcome` is set once, when it is consumed."""

    draw: int
    task: Task
    n: int
    version: int
    results: list[EpisodeResult] = field(default_factory=list)
    outcome: str = ""

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
