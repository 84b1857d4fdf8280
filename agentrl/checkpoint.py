"""Checkpoints on disk: written whole or not at all, the latest and the best marked, old ones pruned by step."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .disk import room, writing
from .errors import AgentRLError, ConfigError, DataError, InfrastructureError, RunStoppedError

PART, OLD, PINNED = ".part", ".old", "pinned"
NAME = re.compile(r"step_\d+(\.old)?")


@dataclass(frozen=True)
class RunState:
    """Where a run stands besides its weights and rollouts.

    `reissue` = draws in flight, issued again first; `evaluated` = the step evaluated last; `best` = the highest evaluation
    score that a checkpoint has, that of `best_step`; `source` = the task source's own state.
    """

    step: int = 0
    version: int = 0
    next_draw: int = 0
    reissue: tuple[int, ...] = ()
    evaluated: int = -1
    best: float | None = None
    best_step: int | None = None
    source: dict[str, Any] | None = None


class Checkpoints:
    """`step_000010/` folders under one parent; `latest` names the newest that is complete, `best` the best.

    At every moment at least one of those that were ever completed can be loaded. A folder with a file `pinned` in it and
    the best one are never pruned.
    """

    def __init__(self, folder: Path, keep: int, minutes: float = 0.0) -> None:
        self.folder = folder
        self.keep = keep
        self._minutes = minutes
        self._saved_at = time.monotonic()

    @property
    def overdue(self) -> bool:
        """Whether more than `minutes` have passed since the last, or since the run began; never where that is 0."""
        return self._minutes > 0 and time.monotonic() - self._saved_at > 60.0 * self._minutes

    async def save(self, state: RunState, write: Callable[[Path], Awaitable[None]]) -> Path:
        """`write(folder)` puts everything but the run state into a temporary folder, which then takes its name.

        Raises RunStoppedError when that fails, and InfrastructureError when whoever writes is lost; what `latest` names can
        be loaded then as before.
        """
        target = self.folder / f"step_{state.step:06d}"
        part = target.with_suffix(PART)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            await write(part)
            (part / "run.json").write_text(json.dumps(asdict(state)))
            _sync_tree(part)
            self._name(part, target)
            self._mark("latest", target.name)
            if state.best_step == state.step:
                self._mark("best", target.name)
            self._prune(target, state.best_step)
            self._saved_at = time.monotonic()
        except InfrastructureError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        except Exception as error:
            said = self._failed(state.step, error)
            shutil.rmtree(part, ignore_errors=True)
            raise RunStoppedError(said) from error
        return target

    def go_on_from(self, checkpoint: Path) -> RunState:
        """The state of a checkpoint, from which a run goes on; the markers are then those of its line, not of later steps
        that it went back behind. Its best is forgotten where another has taken that folder, or none is left. What saves that
        were cut short have left is removed.
        """
        state = read_state(checkpoint)
        for part in self.folder.glob(f"step_*{PART}"):
            shutil.rmtree(part, ignore_errors=True)
        if checkpoint.parent.resolve() != self.folder.resolve():
            return replace(state, best=None, best_step=None)
        with writing(self.folder):
            self._mark("latest", checkpoint.stem)
            return self._best_of(state)

    def _best_of(self, state: RunState) -> RunState:
        best = self.folder / f"step_{state.best_step or 0:06d}"
        if state.best_step is not None and self._is_whole(best) and read_state(best).best == state.best:
            self._mark("best", best.name)
            return state
        (self.folder / "best").unlink(missing_ok=True)
        return replace(state, best=None, best_step=None)

    async def then(self, what: str, call: Awaitable[None]) -> None:
        """`call`, once the run is saved. Raises RunStoppedError when it fails, and says what is left."""
        try:
            await call
        except AgentRLError:
            raise
        except Exception as error:
            raise RunStoppedError(f"{what} failed: {_in_words(error)}{room(self.folder)}. {self.way_on()}") from error

    def _name(self, part: Path, target: Path) -> None:
        """`part` takes the name of `target`. One that has the name already stays loadable until then."""
        old = target.with_suffix(OLD)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(part, target)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _mark(self, marker: str, name: str) -> None:
        part = self.folder / f"{marker}{PART}"
        part.write_text(name)
        _sync(part)
        os.replace(part, self.folder / marker)
        _sync(self.folder)

    def _failed(self, step: int, error: Exception) -> str:
        """How full the disk is as well, while what does not fit is still on it: torch's words for a full one say nothing."""
        return (
            f"the checkpoint of step {step} could not be saved: {_in_words(error)}{room(self.folder)}. {self.way_on()}"
        )

    def way_on(self) -> str:
        """What `--resume latest` would go on from, as a sentence."""
        try:
            return f"--resume latest goes on from {self.find('latest').stem}, which is whole."
        except ConfigError:
            return "There is no checkpoint to go on from."

    def _prune(self, newest: Path, best_step: int | None) -> None:
        """Keep `newest`, also where a run that was gone back on left later steps, and the last of the others."""
        others = [path for path in self.complete() if path != newest]
        for old in others[: max(0, len(others) - (self.keep - 1))]:
            if step_of(old) != best_step and not (old / PINNED).exists():
                doomed = old.with_suffix(PART)
                shutil.rmtree(doomed, ignore_errors=True)  # an interrupted save may have left one
                os.replace(old, doomed)
                shutil.rmtree(doomed)

    def complete(self) -> list[Path]:
        """Whole checkpoints, oldest step first."""
        named = [path for path in self.folder.glob("step_*") if NAME.fullmatch(path.name)]
        found = [path for path in named if self._is_whole(path)]
        whole = [path for path in found if path.suffix != OLD or not path.with_suffix("").exists()]
        return sorted(whole, key=step_of)

    def _is_whole(self, folder: Path) -> bool:
        return (folder / "run.json").is_file()

    def find(self, which: str) -> Path:
        """The folder of `latest`, of `best` or of a path. Raises ConfigError."""
        if which in ("latest", "best"):
            marker = self.folder / which
            if not marker.is_file():
                raise ConfigError(f"--resume {which}: there is no checkpoint in {self.folder}.")
            path = self.folder / marker.read_text().strip()
        else:
            path = Path(which)
        found = path if self._is_whole(path) or not path.name else path.with_suffix(OLD)
        if not self._is_whole(found):
            raise ConfigError(f"--resume {which}: this is not the folder of a checkpoint.")
        return found


def _in_words(error: Exception) -> str:
    """Of an error that crossed a process the last line is what was raised there."""
    cause = (str(error).strip() or "no message").splitlines()[-1]
    return f"{type(error).__name__}: {cause}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.stem.removeprefix("step_"))


def read_state(folder: Path) -> RunState:
    """The run state of a checkpoint. Raises DataError."""
    try:
        stored = json.loads((folder / "run.json").read_text())
        return RunState(**{**stored, "reissue": tuple(stored["reissue"])})
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{folder} is no checkpoint that can be read: {type(error).__name__}: {error}") from error


def _sync_tree(folder: Path) -> None:
    """Every file and folder below a folder, and itself, on disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
