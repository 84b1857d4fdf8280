"""What a run is doing right now, in a small file that the driver keeps in the run folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError

EVERY_S = 2.0
log = logging.getLogger(__name__)


class StatusFile:
    """`status.json`, written whole every EVERY_S seconds while a run lives. `describe` gives its content, and may be another
    function from some moment on.
    """

    def __init__(self, path: Path, describe: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._path = path
        self.describe = describe

    async def keep(self) -> None:
        """Until cancelled; the last word is then that the run has ended."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(EVERY_S)
        finally:
            self._write({"ended": True})

    async def _look(self) -> None:
        """A look that fails leaves what was written before."""
        try:
            content = await self.describe()
        except Exception as error:
            log.warning("%s is not up to date: %s: %s", self._path, type(error).__name__, error)
        else:
            self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        """A run does not end because this file cannot be written."""
        part = self._path.with_suffix(".part")
        try:
            part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), **content}))
            os.replace(part, self._path)
        except OSError as error:
            log.debug("%s cannot be written: %s", self._path, error)


def read_status(run: Path) -> dict[str, Any]:
    """What the run in this folder wrote last. Raises ConfigError where there is nothing."""
    path = run / "status.json"
    if not path.is_file():
        raise ConfigError(f"{run} holds no status.json: it is not the folder of a run that has begun.")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
