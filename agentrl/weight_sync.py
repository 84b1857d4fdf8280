"""The trainer's weights on the engines: one version everywhere, and one owner of the trainer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from .config import Config
from .engine import SleepingEngine
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
        self.colocated = config.engine.colocated
        self._watch = config.watchdog

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer, for whoever is to call it. Colocated, the engines, on which nothing may run, sleep meanwhile and come
        back with the weights of `version`, which `publish` then only sets; after a failure they stay asleep.
        """
        async with self.trainer_free:
            if self.colocated:
                await self.watched(self.fleet.sleep(), "the engines to sleep")
                await self.watched(self.trainer.onload(), "the trainer to come back to the GPU")
            yield
            if self.colocated:
                await self.wake()

    async def wake(self) -> None:
        """The trainer leaves the GPU to the engines, which wake with its weights."""
        async with self._published(self.version) as source:
            await self.watched(self.trainer.offload(), "the trainer to leave the GPU")
            await self.watched(self.fleet.wake(source, self.version), "the engines to wake")

    async def watched(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """A call that the watchdog bounds. Raises InfrastructureError that names `what`."""
        return await within(call, what, warn_after=self._watch.warn_after, fail_after=self._watch.fail_after)

    async def publish(self, version: int) -> None:
        """The trainer's weights on every engine under a new version; what they run goes on with them. The caller holds
        `trainer_free`: an engine that joins meanwhile would get neither the old version nor the new one.
        """
        if not self.colocated:
            async with self._published(version) as source:
                await self.fleet.publish(source, version)
        self.version = version

    async def give(self, index: int, engine: SleepingEngine) -> None:
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
