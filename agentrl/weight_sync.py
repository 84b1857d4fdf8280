"""The trainer's weights on the engines: one version everywhere, and one owner of the trainer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from .config import Config
from .engine import Engine
from .engines.fleet import EngineFleet
from .rollout.watchdog import within
from .training import Trainer

T = TypeVar("T")


class WeightSync:
    """`version` = what the engines serve. Whoever calls the trainer holds `trainer_free`."""

    def __init__(self, config: Config, trainer: Trainer, fleet: EngineFleet, version: int = 0) -> None:
        self.version = version
        self.trainer = trainer
        self.fleet = fleet
        self.trainer_free = asyncio.Lock()
        self._watch = config.watchdog

    async def watched(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """A call that the watchdog bounds. Raises InfrastructureError that names `what`."""
        return await within(call, what, warn_after=self._watch.warn_after, fail_after=self._watch.fail_after)

    async def publish(self, version: int) -> None:
        """The trainer's weights on every engine under a new version; what they run goes on with them. The caller holds
        `trainer_free`: an engine that joins meanwhile would get neither the old version nor the new one.
        """
        async with self._published(version) as source:
            await self.fleet.publish(source, version)
        self.version = version

    async def give(self, index: int, engine: Engine) -> None:
        """The version that the others serve on an engine that takes its place in the fleet now. Waits for the trainer."""
        async with self.trainer_free, self._published(self.version) as source:
            await engine.pause("keep")
            await engine.update_weights(source, self.version)
            await engine.resume()
            self.fleet.engines[index] = engine
            self.fleet.out.discard(index)

    @asynccontextmanager
    async def _published(self, version: int) -> AsyncIterator[Any]:
        source = await self.watched(self.trainer.publish(version), f"the trainer to publish version {version}")
        try:
            yield source
        finally:
            await self.watched(self.trainer.release(source), "the trainer to free what it published")
