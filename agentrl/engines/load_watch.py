"""Looks at the engines from time to time: none is given more episodes than its KV cache holds, and one that is ill is
replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ..engine import Health
from ..rollout.load import adjusted
from ..rollout.seats import Seats
from .fleet import EngineFleet

EVERY_S = 1.0
log = logging.getLogger(__name__)


class LoadWatch:
    """Asks every engine of the fleet for its health, and tells the seats how many episodes it is given from now on.

    `lose(index, why)` takes an engine that says itself that it is ill, and one that has not answered for `patience_s`: what
    is played on it would only find out when its own time is over.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        seats: Seats,
        lose: Callable[[int, str], None],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._seats = seats
        self._lose = lose
        self._patience_s = patience_s
        self._clock = clock
        self._deaf_since: dict[int, float] = {}

    async def keep(self) -> None:
        """Until cancelled. One that does not answer holds up no look at the others."""
        await asyncio.gather(*(self._keep(index) for index in range(len(self._fleet.engines))))

    async def _keep(self, index: int) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look(index)

    async def look(self, index: int) -> None:
        """One look at an engine, if it serves."""
        if index in self._fleet.out:
            self._deaf_since.pop(index, None)
            return
        engine = self._fleet.engines[index]
        health = await engine.health()
        if index in self._fleet.out or self._fleet.engines[index] is not engine:
            return
        self._adjust(index, health)
        if health.answered:
            self._deaf_since.pop(index, None)
        if not health.ok and (health.answered or self._deaf_s(index) >= self._patience_s):
            self._lose(index, health.detail)

    def _deaf_s(self, index: int) -> float:
        """Seconds since the first look that was not answered."""
        return self._clock() - self._deaf_since.setdefault(index, self._clock())

    def _adjust(self, index: int, health: Health) -> None:
        before = self._seats.loads[index]
        after = adjusted(before, self._seats.playing[index], health)
        self._seats.adjust(index, after)
        if after.limit < before.limit:
            log.info("engine %d is short of KV cache: %.0f episodes at once from now on", index, after.limit)
