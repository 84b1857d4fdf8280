"""All engines of a run at a weight update: every one paused, updated and resumed, or the run stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from ..engine import Engine


class EngineFleet:
    """Engines that always serve one version. `publish` leaves no engine paused, whatever fails."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    async def publish(self, source: Any, version: int) -> None:
        """New weights on every engine. Running requests are kept and go on with them."""
        try:
            await _all(engine.pause("keep") for engine in self.engines)
            await _all(engine.update_weights(source, version) for engine in self.engines)
        finally:
            await _all(engine.resume() for engine in self.engines)


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Every call to its end, so that none runs on into what comes next; then the first failure is raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
