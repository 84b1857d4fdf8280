"""Looks at the engines from time to time, so that none is given more episodes than its KV cache holds."""

from __future__ import annotations

import asyncio
import logging

from ..rollout.load import adjusted
from ..rollout.seats import Seats
from .fleet import EngineFleet

EVERY_S = 1.0
log = logging.getLogger(__name__)


class LoadWatch:
    """Asks every engine of the fleet for its health, and tells the seats how many episodes it is given from now on."""

    def __init__(self, fleet: EngineFleet, seats: Seats) -> None:
        self._fleet = fleet
        self._seats = seats

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """One look at every engine that serves."""
        serving = [index for index in range(len(self._fleet.engines)) if index not in self._fleet.out]
        found = await asyncio.gather(*(self._fleet.engines[index].health() for index in serving))
        for index, health in zip(serving, found, strict=True):
            before = self._seats.loads[index]
            after = adjusted(before, self._seats.playing[index], health)
            self._seats.adjust(index, after)
            if after.limit < before.limit:
                log.info("engine %d is short of KV cache: %.0f episodes at once from now on", index, after.limit)
