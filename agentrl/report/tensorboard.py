"""Every number of a record as a TensorBoard scalar."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError


class TensorBoardSink:
    """Writes event files to a folder. A run that goes on takes back what an earlier one has logged from its first step on.
    Raises ConfigError when the tensorboard package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        check_installed()
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        self._begun = False

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def stage(self, doing: str) -> None:
        return None

    def step(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if not self._begun:
            begin = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=int(record["step"]), session_log=begin))
            self._begun = True
        self.evaluation(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value))
            for key, value in record.items()
            if key not in ("step", "time") and isinstance(value, int | float)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=int(record["step"]), summary=Summary(value=values)))


def check_installed() -> None:
    """Raises ConfigError when the tensorboard package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--log.tensorboard needs the tensorboard package: pip install tensorboard.")
