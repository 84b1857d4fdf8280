"""What vLLM's scheduler last said, and for how long it has said nothing to those who wait for an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stats:
    """A stat logger by shape (vLLM's `StatLoggerBase`): vLLM calls `record` whenever its core has brought something.

    `frozen` = the core is paused and owes nothing meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = self.preemptions = 0
        self.kv_usage = 0.0
        self.frozen = False
        self._clock = clock
        self._moved = clock()
        self._owed = 0
        self._given_up = 0.0

    @contextmanager
    def owed(self) -> Iterator[None]:
        """One request, from its admission to its answer. What is given up inside a silence was never answered: the silence
        is remembered until the core moves again.
        """
        if not self._owed:
            self._moved = self._clock()
        self._owed += 1
        try:
            yield
        except asyncio.CancelledError:
            self._given_up = self.silent_s
            raise
        finally:
            self._owed -= 1

    @property
    def silent_s(self) -> float:
        """Seconds without any sign of the core while it owed an answer."""
        waited = self._clock() - self._moved if self._owed and not self.frozen else 0.0
        return max(waited, self._given_up)

    def freeze(self, frozen: bool) -> None:
        """The core was paused, or goes on now: what it owes counts from here."""
        self.frozen = frozen
        self._moved = self._clock()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._moved, self._given_up = self._clock(), 0.0
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass
