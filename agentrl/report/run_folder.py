"""The folder of a run: config.toml, metrics.jsonl, rollouts/, images/, checkpoints/, final/, status.json."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..disk import writing
from ..errors import ConfigError
from .finite import finite
from .record import JSON_LINES, json_line

log = logging.getLogger(__name__)


class RunFolder:
    """Everything a run writes. Lines are flushed as they are written, so a crash loses at most the line under way. Raises
    InfrastructureError where the disk refuses.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def fresh(cls, parent: str, name: str) -> RunFolder:
        """The folder of a new run; `begin` makes it. Raises ConfigError when a run of that name is there already."""
        if Path(name).name != name:
            raise ConfigError(f"--run.name {name}: a name, not a path; the folder of the runs is --run.dir.")
        folder = cls(Path(parent) / name)
        there = next(path for path in folder.path.resolve().parents if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ConfigError(f"--run.dir {parent}: {there} is no folder that can be written to.")
        if folder.metrics.exists() or folder.checkpoints.exists():
            raise ConfigError(
                f"{folder.path} holds a run already. Give another --run.name, or --resume latest to go on with it."
            )
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process may take the folder meanwhile; the lock goes with this one, however it ends. Raises ConfigError when
        another has it.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path} is being written by another process: this run is still going on."
                ) from None
            except OSError as error:
                log.debug("%s: a file system without locks: %s", self.path, error)
            yield

    def begin(self, config: str, resumed_at: int | None) -> None:
        """Make the folder and save the configuration; records after the step a run goes on from move out of the way, and all
        that one left that ended before its first step.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / "config.toml", config)
            self.rewind(-1 if resumed_at is None else resumed_at)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def final(self) -> Path:
        return self.path / "final"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.jsonl"

    def bad_rows(self, step: int) -> Path:
        """Rows that were left out, or cost an update, for a number that is not finite."""
        return self.path / "bad_rows" / f"step_{step:06d}.jsonl"

    def add_metrics(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl; what is not finite is left out, see `finite`."""
        _append(self.metrics, [finite(record)])

    def add_rollouts(self, step: int, records: Iterable[dict[str, Any]]) -> None:
        path = self.rollouts(step)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, records)

    def amend_metrics(self, record: dict[str, Any]) -> None:
        """Add keys to the record of the newest step, which is `record["step"]`; without one it becomes a record of its own,
        with the time.
        """
        lines = self._lines()
        if lines and json.loads(lines[-1])["step"] == record["step"]:
            lines[-1] = json.dumps(finite({**json.loads(lines[-1]), **record}), ensure_ascii=False)
            self._rewrite(lines)
        else:
            self.add_metrics({"time": time.time(), **record})

    def _text(self) -> str:
        return self.metrics.read_text(encoding="utf-8") if self.metrics.is_file() else ""

    def _lines(self) -> list[str]:
        """The whole lines of metrics.jsonl; one that a crash cut short is left out."""
        return [line for line in self._text().split("\n")[:-1] if line.strip()]

    def _rewrite(self, lines: list[str]) -> None:
        with writing(self.metrics):
            _replace(self.metrics, "".join(line + "\n" for line in lines))

    def rewind(self, step: int) -> None:
        """Records after `step` move to superseded/, so that steps rise by one across a resume."""
        superseded = self.path / "superseded"
        for path in sorted((self.path / "rollouts").glob("step_*.jsonl")):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                superseded.mkdir(exist_ok=True)
                os.replace(path, _free_name(superseded / path.name))
        lines = self._lines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        if "".join(line + "\n" for line in kept) != self._text():
            superseded.mkdir(exist_ok=True)
            shutil.copy(self.metrics, _free_name(superseded / self.metrics.name))
            self._rewrite(kept)


def _replace(path: Path, text: str) -> None:
    """The file has the old text or the new one, whatever happens meanwhile."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with writing(path), path.open("a", **JSON_LINES) as file:
        for record in records:
            file.write(json_line(record))


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return free
