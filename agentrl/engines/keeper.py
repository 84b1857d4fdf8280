"""Replaces engines that died or do not answer; their episodes wait and are played again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..engine import SleepingEngine
from ..errors import EngineError, InfrastructureError, RunStoppedError
from ..rollout.episode import EpisodeOrder, EpisodeResult
from ..rollout.player import Player, play_once
from .fleet import EngineFleet

ATTEMPTS = 3
log = logging.getLogger(__name__)


class EngineKeeper:
    """`respawn(index)` ends an engine and starts another in its place; `serve(index, engine)` gives it the current weights
    and puts it into the fleet. No request reaches it before that. At most `most` engines are replaced in one run.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        respawn: Callable[[int], Awaitable[SleepingEngine]],
        serve: Callable[[int, SleepingEngine], Awaitable[None]],
        most: int,
    ) -> None:
        self.replaced = 0
        self._fleet = fleet
        self._respawn = respawn
        self._serve = serve
        self._most = most
        self._replacing: dict[int, asyncio.Task[None]] = {}
        fleet.lost = self.lose

    def lose(self, index: int, why: str) -> None:
        """Replace this engine, once, however many report its loss."""
        if index in self._fleet.out:
            return
        log.warning("engine %d is lost and will be replaced: %s", index, why)
        self._fleet.out.add(index)
        self._replacing[index] = asyncio.create_task(self._replace(index, why))

    async def _replace(self, index: int, why: str) -> None:
        """Until one serves; it too may die, also while it starts. What fails ATTEMPTS times in a row will not go better."""
        for attempt in range(ATTEMPTS):
            self.replaced += 1
            if self.replaced > self._most:
                raise RunStoppedError(
                    f"engine {index} is lost ({why}), after {self._most} engines (engine.max-restarts)."
                )
            try:
                await self._serve(index, await self._respawn(index))
            except (EngineError, InfrastructureError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise RunStoppedError(
                        f"engine {index} was lost ({why}) and could not be replaced: {error}"
                    ) from error
                log.warning("engine %d did not come back, another one is started: %s", index, error)
            else:
                log.warning("engine %d is replaced", index)
                return

    async def ready(self, index: int) -> None:
        """The engine is there. Raises RunStoppedError when it could not be replaced."""
        if index in self._replacing:
            await asyncio.shield(self._replacing[index])

    def instead(self, index: int) -> int | None:
        """This engine, or another that serves while it is being replaced; None when none does."""
        serving = [i for i in range(len(self._fleet.engines)) if i not in self._fleet.out]
        if index in serving or not serving:
            return index if serving else None
        return serving[index % len(serving)]

    async def check(self, index: int, why: str) -> None:
        """An episode lost its engine: replace that if it does not answer."""
        engine = self._fleet.engines[index]
        if index in self._fleet.out or (await engine.health()).ok:
            return
        if self._fleet.engines[index] is engine:
            self.lose(index, why)

    async def close(self) -> None:
        """Replace nothing any more."""
        for task in self._replacing.values():
            task.cancel()
        await asyncio.gather(*self._replacing.values(), return_exceptions=True)


class KeptPlayer:
    """A player that has an engine looked at when an episode lost it. Who orders training episodes awaits
    `EngineKeeper.ready` first; an evaluation only as long as what a new engine needs does not wait for the evaluation.
    """

    def __init__(self, player: Player, keeper: EngineKeeper) -> None:
        self._player = player
        self._keeper = keeper

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        result = await play_once(self._player, order)
        if result.error is not None and result.error["class"] == EngineError.__name__:
            await self._keeper.check(order.engine, f"{order.rollout_id}: {result.error['message']}")
        return result
