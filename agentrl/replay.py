"""Recorded rollouts in the place of a dispatcher: the loop trains on them again, with no engine and no environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .env import Task
from .errors import ConfigError
from .report.read_record import read_episode, read_lines
from .rollout.group import Batch, Group
from .rollout.ledger import HeldRollouts

NEVER_TRAINED = ("filtered", "stale", "cancelled")


class RecordedBatches:
    """The batches of a run's `rollouts/` folder after `step`, one file each, files without a trained group left out.

    A batch holds what was trained, in the same order, so the same configuration gives the same weights. Raises ConfigError
    for a folder without such files.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        files = sorted(folder.glob("step_*.jsonl"))
        if not files:
            raise ConfigError(f"--replay {folder}: there are no step_*.jsonl files in it.")
        self._batches = self._read([path for path in files if int(path.stem.removeprefix("step_")) > step])

    @property
    def images(self) -> Path:
        """Where the run kept its pictures."""
        return self.folder.parent / "images"

    def _read(self, files: list[Path]) -> Iterator[Batch]:
        for path in files:
            groups = read_trained(path)
            if groups:
                yield Batch(groups)

    def start(self) -> None:
        """Nothing has to be started."""

    async def next_batch(self) -> Batch | None:
        """The next recorded batch; None after the last."""
        return next(self._batches, None)

    def settle(self, version: int) -> None:
        """No places are given back."""

    async def drain(self) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing runs."""

    def held(self) -> HeldRollouts:
        """Nothing but the step says where a replay stands."""
        return HeldRollouts()

    def abandon(self) -> list[Group]:
        """Nothing is left over."""
        return []

    def groups(self) -> list[dict[str, Any]]:
        """Nothing is in flight."""
        return []

    @property
    def episodes_in_flight(self) -> int:
        return 0


def read_trained(path: Path) -> list[Group]:
    """The groups that a step trained, by draw. Members that failed in them are left in, as they were then."""
    groups: dict[int, Group] = {}
    trained: set[int] = set()
    for record in read_lines(path):
        if record["outcome"] in NEVER_TRAINED:
            continue
        draw = record["draw"]
        group = groups.setdefault(draw, Group(draw, Task(record["task_id"]), 0, 0))
        group.results.append(read_episode(record))
        group.n += 1
        if record["outcome"] == "trained":
            trained.add(draw)
    return [group for draw, group in sorted(groups.items()) if draw in trained]
