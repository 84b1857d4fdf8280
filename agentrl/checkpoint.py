"""Checkpoints on disk: written whole or not at all, the latest marked, old ones pruned by step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ConfigError

PARTIAL = ".part"


@dataclass(frozen=True)
class RunState:
    """Where a run stands besides its weights. `outstanding` draws hold places: they are issued again first."""

    step: int = 0
    version: int = 0
    next_draw: int = 0
    outstanding: tuple[int, ...] = ()


class Checkpoints:
    """`step_000010/` folders under one parent; `latest` names the newest that is complete."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    async def save(self, state: RunState, write: Callable[[Path], Awaitable[None]]) -> Path:
        """`write(folder)` puts the trainer's state into a temporary folder, which then takes its name.

        A failure leaves the earlier checkpoints and the marker as they were.
        """
        target = self.folder / f"step_{state.step:06d}"
        part = target.with_suffix(PARTIAL)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        await write(part)
        (part / "run.json").write_text(json.dumps(asdict(state)))
        _sync(part)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        self._mark(target.name)
        self._prune(target)
        return target

    def _mark(self, name: str) -> None:
        part = self.folder / f"latest{PARTIAL}"
        part.write_text(name)
        os.replace(part, self.folder / "latest")
        _sync(self.folder)

    def _prune(self, newest: Path) -> None:
        """Keep `newest`, also where a run that was gone back on left later steps, and the last of the others."""
        others = [path for path in self.complete() if path != newest]
        for old in others[: max(0, len(others) - (self.keep - 1))]:
            shutil.rmtree(old)

    def complete(self) -> list[Path]:
        """Whole checkpoints, oldest step first."""
        found = [
            path for path in self.folder.glob("step_*") if path.suffix != PARTIAL and (path / "run.json").is_file()
        ]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))

    def find(self, which: str) -> Path:
        """The folder of `latest` or of a path. Raises ConfigError."""
        if which != "latest":
            path = Path(which)
            if not (path / "run.json").is_file():
                raise ConfigError(f"--resume {which}: this is not the folder of a checkpoint.")
            return path
        marker = self.folder / "latest"
        if not marker.is_file():
            raise ConfigError(f"--resume latest: there is no checkpoint in {self.folder}.")
        return self.folder / marker.read_text().strip()


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint."""
    return read_state(folder).step


def read_state(folder: Path) -> RunState:
    """The run state of a checkpoint."""
    stored = json.loads((folder / "run.json").read_text())
    return RunState(**{**stored, "outstanding": tuple(stored["outstanding"])})


def _sync(folder: Path) -> None:
    """Every file of a folder, and the folder, on disk."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
