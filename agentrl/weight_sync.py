"""The trainer's weights on the engines: one version everywhere, and one owner of the trainer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from .config import Config
from .engine import SleepingEngine
from .engines.broadcast import Broadcast
from .engines.fleet import EngineFleet
from .engines.transport import Transport, workers_of_engine
from .rollout.watchdog import within
from .training import Trainer

T = TypeVar("T")


class WeightSync:
    """`version` = what the engines serve; `transport` = how they get it. Whoever calls the trainer holds `trainer_free`."""

    def __init__(
        self, config: Config, trainer: Trainer, fleet: EngineFleet, version: int = 0, transport: Transport = "shm"
    ) -> None:
        self.version = version
        self.trainer = trainer
        self.fleet = fleet
        self.trainer_free = asyncio.Lock()
        self.colocated = config.engine.colocated
        self._watch = config.watchdog
        if transport == "nccl":
            fleet.broadcast = Broadcast(self._send, workers_of_engine(config))

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
        await self._wake(self.fleet)

    async def _wake(self, fleet: EngineFleet) -> None:
        """What was published may lie on the GPU, so it is freed before the engines take the rest of it for their KV cache."""
        async with self._published(self.version) as source:
            await self.watched(self.trainer.offload(), "the trainer to leave the GPU")
            await self.watched(fleet.wake(source, self.version), "the engines to wake")
        await self.watched(fleet.serve(), "the engines to serve")

    async def watched(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """A call that the watchdog bounds. Raises InfrastructureError that names `what`."""
        return await within(call, what, warn_after=self._watch.warn_after, fail_after=self._watch.fail_after)

    async def publish(self, version: int) -> None:
        """The trainer's weights on every engine under a new version; what they run goes on with them. The caller holds
        `trainer_free`: an engine that joins meanwhile would get neither the old version nor the new one. A replay has
        no engine, and copies nothing.
        """
        if self.fleet.engines and not self.colocated:
            async with self._published(version) as source:
                await self.fleet.publish(source, version)
        self.version = version

    async def give(self, index: int, engine: SleepingEngine) -> None:
        """The version that the others serve on an engine that takes its place in the fleet now. Waits for the trainer."""
        async with self.trainer_free:
            if not self.colocated:
                async with self._published(self.version) as source:
                    await self.fleet.join(index, engine, source, self.version)
                return
            alone = EngineFleet([engine])
            await self.watched(alone.sleep(), "the new engine to sleep")
            await self.watched(self.trainer.onload(), "the trainer to come back to the GPU")
            await self._wake(alone)
            self.fleet.take(index, engine)

    async def _send(self, source: Any) -> None:
        await self.watched(self.trainer.send(source), "the trainer to send the weights")

    @asynccontextmanager
    async def _published(self, version: int) -> AsyncIterator[Any]:
        source = await self.watched(self.trainer.publish(version), f"the trainer to publish version {version}")
        try:
            yield source
        finally:
            await self.watched(self.trainer.release(source), "the trainer to free what it published")
