"""What vLLM's schedulers last said, and for how long one has said nothing to those who wait for an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class _Core:
    """One engine core, of which there are several with data_parallel_size: what it last said of its requests, and the moment
    from which it has owed an answer without a sign.
    """

    running: int = 0
    unfinished: int = 0
    kv_usage: float = 0.0
    since: float = 0.0


class Stats:
    """A stat logger by shape (vLLM's `StatLoggerBase`): vLLM calls `record` whenever a core has brought something.

    `frozen` = the cores are paused and owe nothing meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.preemptions = 0
        self.frozen = False
        self._clock = clock
        self._moved = clock()
        self._owed = 0
        self._given_up = 0.0
        self._cores: dict[int, _Core] = {}

    @property
    def running(self) -> int:
        return sum(core.running for core in self._cores.values())

    @property
    def kv_usage(self) -> float:
        """Of the core that has the least room left."""
        return max((core.kv_usage for core in self._cores.values()), default=0.0)

    @contextmanager
    def owed(self) -> Iterator[None]:
        """One request, from its admission to its answer. What is given up inside a silence was never answered: the silence
        is remembered until a core moves again.
        """
        if not self._owed:
            self._begin()
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
        """Seconds without any sign of the cores while they owed an answer, or of one of them while it did."""
        if not self._owed or self.frozen:
            return self._given_up
        since = [core.since for core in self._cores.values() if self._owes(core)]
        return max(self._clock() - min([self._moved, *since]), self._given_up)

    def _owes(self, core: _Core) -> bool:
        """Whether requests of this core are awaited: it has some, unless they were given up since it said so, and the others
        do not have all there are.
        """
        others = sum(other.unfinished for other in self._cores.values() if other is not core)
        return core.unfinished > 0 and others < self._owed

    def freeze(self, frozen: bool) -> None:
        """The cores were paused, or go on now: what they owe counts from here."""
        self.frozen = frozen
        self._begin()

    def _begin(self) -> None:
        self._moved = self._clock()
        for core in self._cores.values():
            core.since = self._moved

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._moved, self._given_up = self._clock(), 0.0
        core = self._cores.setdefault(engine_idx, _Core())
        core.since = self._moved
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            core.running = scheduler_stats.num_running_reqs
            core.unfinished = core.running + waiting
            core.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        for other in self._cores.values():
            if not self._owes(other):
                other.since = self._moved

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass
