"""All engines of a run at a weight update: every one paused, updated and resumed, or the run stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..engine import SleepingEngine
from ..errors import EngineError


class EngineFleet:
    """Engines that serve one version. `publish` leaves none of them paused, whatever fails.

    `out` = places whose engine is being replaced: an update passes them over. `lost(index, why)`, if set, takes an engine
    that does not answer; without it the failure of one engine ends the update.
    """

    def __init__(self, engines: Sequence[SleepingEngine]) -> None:
        self.engines = list(engines)
        self.out: set[int] = set()
        self.lost: Callable[[int, str], None] | None = None

    async def publish(self, source: Any, version: int) -> None:
        """New weights on every engine. Running requests are kept and go on with them."""
        try:
            await self._all(lambda engine: engine.pause("keep"))
            await self._all(lambda engine: engine.update_weights(source, version))
        finally:
            await self._all(lambda engine: engine.resume())

    async def sleep(self) -> None:
        """Every engine gives up its device's memory. Nothing runs on it."""
        await self._all(lambda engine: engine.pause("wait"))
        await self._all(lambda engine: engine.sleep())

    async def wake(self, source: Any, version: int) -> None:
        """Every engine serves again, with these weights: what it had is gone. The KV cache comes last, when the loading
        needs no room any more. One that does not come back stays asleep, and the run stops.
        """
        await self._all(lambda engine: engine.wake("weights"))
        await self._all(lambda engine: engine.update_weights(source, version))
        await self._all(lambda engine: engine.wake("kv_cache"))
        await self._all(lambda engine: engine.resume())

    async def _all(self, call: Callable[[SleepingEngine], Coroutine[Any, Any, None]]) -> None:
        """Every call to its end, so that none runs on into what comes next; then the first failure is raised."""
        serving = [index for index in range(len(self.engines)) if index not in self.out]
        calls = [call(self.engines[index]) for index in serving]
        failures = []
        for index, outcome in zip(serving, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException) and not await self._replaceable(index, outcome):
                failures.append(outcome)
        if failures:
            raise failures[0]

    async def _replaceable(self, index: int, failure: BaseException) -> bool:
        """Whether it was the engine's death or silence, and someone replaces it. A refusal by a healthy one is a failure."""
        if self.lost is None or not isinstance(failure, EngineError) or (await self.engines[index].health()).ok:
            return False
        self.lost(index, str(failure))
        return True
