"""All engines of a run at a weight update: every one paused, updated and resumed, or the run stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ..engine import SleepingEngine
from ..errors import EngineError
from .broadcast import Broadcast


class EngineFleet:
    """Engines that serve one version. `publish` leaves none of them paused, whatever fails.

    `out` = places whose engine is being replaced: an update passes them over. `lost(index, why)`, if set, takes an engine
    that does not answer; without it the failure of one engine ends the update. `broadcast`, if set, is how the trainer sends
    while the engines load.
    """

    def __init__(self, engines: Sequence[SleepingEngine]) -> None:
        self.engines = list(engines)
        self.out: set[int] = set()
        self.lost: Callable[[int, str], None] | None = None
        self.broadcast: Broadcast | None = None

    async def publish(self, source: Any, version: int) -> None:
        """New weights on every engine. Running requests are kept and go on with them."""
        try:
            await self._all(lambda engine: engine.pause("keep"))
            await self._load(source, version)
        finally:
            await self._all(lambda engine: engine.resume())

    async def sleep(self) -> None:
        """Every engine gives up its device's memory. Nothing runs on it."""
        await self._all(lambda engine: engine.pause("wait"))
        await self._all(lambda engine: engine.sleep())

    async def wake(self, source: Any, version: int) -> None:
        """Every engine has room for weights again, and these: what it had is gone. One that does not come back stays asleep,
        and the run stops. `serve` comes next.
        """
        await self._all(lambda engine: engine.wake("weights"))
        await self._load(source, version)

    async def serve(self) -> None:
        """Engines that are awake serve again. Their KV cache comes last, when loading needs no room any more."""
        await self._all(lambda engine: engine.wake("kv_cache"))
        await self._all(lambda engine: engine.resume())

    async def join(self, index: int, engine: SleepingEngine, source: Any, version: int) -> None:
        """An engine takes a place in the fleet, with these weights. Until it has them no other update may begin."""
        await engine.pause("keep")
        await self._load_on([engine], source, version)
        await engine.resume()
        self.take(index, engine)

    def take(self, index: int, engine: SleepingEngine) -> None:
        """An engine that has the current weights takes a place."""
        self.engines[index] = engine
        self.out.discard(index)

    async def _load(self, source: Any, version: int) -> None:
        await self._load_on([self.engines[index] for index in self._serving()], source, version)

    async def _load_on(self, engines: list[SleepingEngine], source: Any, version: int) -> None:
        """These weights on these engines, while the trainer sends them where the transport wants it. A failure of the trainer
        that came of the loss of an engine is none: that one is replaced.
        """
        broadcast = self.broadcast
        if broadcast is None or not engines:
            await self._each(engines, [engine.update_weights(source, version) for engine in engines])
            return
        parts = broadcast.parts(source, engines)
        loading = [engine.update_weights(part, version) for engine, part in zip(engines, parts, strict=True)]
        before = set(self.out)
        sent, loaded = await asyncio.gather(
            broadcast.send(parts[0]), self._each(engines, loading), return_exceptions=True
        )
        lost = self.out - before
        if sent is not None or loaded is not None or lost:
            broadcast.forget()
        for failure in (loaded, None if lost else sent):
            if isinstance(failure, BaseException):
                raise failure

    def _serving(self) -> list[int]:
        return [index for index in range(len(self.engines)) if index not in self.out]

    async def _all(self, call: Callable[[SleepingEngine], Coroutine[Any, Any, None]]) -> None:
        engines = [self.engines[index] for index in self._serving()]
        await self._each(engines, [call(engine) for engine in engines])

    async def _each(self, engines: list[SleepingEngine], calls: list[Coroutine[Any, Any, None]]) -> None:
        """Every call to its end, so that none runs on into what comes next; then the first failure is raised."""
        failures = []
        for engine, outcome in zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, BaseException) and not await self._replaceable(engine, outcome):
                failures.append(outcome)
        if failures:
            raise failures[0]

    async def _replaceable(self, engine: SleepingEngine, failure: BaseException) -> bool:
        """Whether it was the engine's death or silence, and someone replaces it. A refusal by a healthy one is a failure, and
        so is that of one that has no place yet.
        """
        index = next((index for index, one in enumerate(self.engines) if one is engine), None)
        if self.lost is None or index is None or not isinstance(failure, EngineError) or (await engine.health()).ok:
            return False
        self.lost(index, str(failure))
        return True
