"""Who may be played now: a bound over all engines, one for each, and the oldest draws first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .load import Load

Turn = tuple[int, int]
"""(draw, sample): the smaller goes first, and of two that are equal who came first."""


class Seats:
    """At most `most` episodes are played at once (None = no bound), and on each engine as many as its load allows. `waiting` =
    those that are held back by that.
    """

    def __init__(self, engines: int, most: int | None = None) -> None:
        self.loads = [Load() for _ in range(engines)]
        self.playing = [0] * engines
        self.waiting = 0
        self._most = math.inf if most is None else most
        self._assigned = [0] * engines
        self._waiting: list[list[tuple[Turn, int, asyncio.Future[None]]]] = [[] for _ in range(engines)]
        self._came = itertools.count()

    def least_loaded(self, episodes: int) -> int:
        """The engine with the fewest episodes assigned to it, which now gets so many more."""
        engine = min(range(len(self._assigned)), key=self._assigned.__getitem__)
        self._assigned[engine] += episodes
        return engine

    def over(self, engine: int) -> None:
        """An episode that was assigned to the engine has come out."""
        self._assigned[engine] -= 1

    @asynccontextmanager
    async def one(self, engine: int, turn: Turn) -> AsyncIterator[None]:
        """A seat at the engine, held inside the block."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[engine], (turn, next(self._came), waiter))
        self.waiting += 1
        self._seat()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self.waiting -= 1
            else:
                self._rise(engine)
            raise
        try:
            yield
        finally:
            self._rise(engine)

    def adjust(self, engine: int, load: Load) -> None:
        """The engine's load has been looked at."""
        self.loads[engine] = load
        self._seat()

    def _rise(self, engine: int) -> None:
        self.playing[engine] -= 1
        self._seat()

    def _seat(self) -> None:
        """Give away the seats that are free."""
        while sum(self.playing) < self._most:
            open_ = [e for e, load in enumerate(self.loads) if self._next(e) and self.playing[e] < load.limit]
            if not open_:
                return
            engine = min(open_, key=lambda e: self._waiting[e][0][0])
            self.playing[engine] += 1
            self.waiting -= 1
            heapq.heappop(self._waiting[engine])[-1].set_result(None)

    def _next(self, engine: int) -> bool:
        """Whether anyone waits for this engine; those that gave up are forgotten."""
        waiting = self._waiting[engine]
        while waiting and waiting[0][-1].done():
            heapq.heappop(waiting)
        return bool(waiting)
