"""Keeps the engines busy: starts groups while there are places, collects them, hands out batches.

Every scheduled episode comes out exactly once: finished or failed. What becomes of a group is decided in `ledger.py` and
`staleness.py`; this class does the waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..config import Config
from ..engine import Limits
from ..errors import InfrastructureError, RunStoppedError
from ..task_list import NotReadYet, without_waiting
from .episode import EpisodeOrder, EpisodeResult
from .error_rate import ErrorRate
from .group import Batch, Group
from .ledger import GroupLedger, HeldRollouts
from .orders import draw_order
from .player import Player, play_once
from .seats import Seats
from .stages import PLAYED, Stages, in_words
from .staleness import places
from .task_source import DrawSource
from .watchdog import within

SHOWN = 4
ASK_AGAIN_S = 1.0
log = logging.getLogger(__name__)


class Dispatcher:
    """One owner of the budget. Call `start`, then `next_batch` and `settle` in turns, then `stop`.

    A group stays on one engine, as its members share a prefix; it goes to the one that has the fewest episodes. `ready(engine)`
    returns when an episode may be sent to that engine.
    """

    def __init__(
        self,
        config: Config,
        player: Player,
        tasks: DrawSource,
        limits: Limits,
        ledger: GroupLedger,
        ready: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.config = config
        self.player = player
        self.tasks = tasks
        self.limits = limits
        self.ledger = ledger
        self._ready = ready
        self.stages = Stages()
        train, rollout = config.train, config.rollout
        most = places(train.batch_groups, train.max_staleness, oversample=rollout.oversample)
        self._errors = ErrorRate(rollout, most)
        self._changed = asyncio.Event()
        self._closable = True
        self._stopped = False
        self._failure: BaseException | None = None
        self._episodes: set[asyncio.Task[None]] = set()
        self._missing: NotReadYet | None = None
        self._reading: asyncio.Task[None] | None = None
        self._attempts = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self.seats = Seats(config.engine.count, config.rollout.max_episodes)

    # ------------------------------------------------------------------ what the loop calls

    def start(self) -> None:
        """Begin to dispatch."""
        self._fill()

    async def next_batch(self) -> Batch | None:
        """The next batch as soon as it can be closed; None when the data is used up. Groups that ended without training
        since the last one are then still `held`.

        Raises what broke the dispatcher, RunStoppedError when too many episodes fail or no group passes the filter, and
        InfrastructureError when nothing happens for too long. A caller that is cancelled has taken no batch.
        """
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            self._errors.check(len(self._episodes) - self.seats.waiting)
            self._check_filter()
            batch = self._take()
            if batch is not None:
                return batch
            if self.ledger.over:
                return None
            await self._awaited(self._changed)

    async def _awaited(self, event: asyncio.Event) -> None:
        """Episodes have bounds of their own, which come first: waiting for them is over watchdog.fail_after later. So has an
        evaluation that holds every seat.
        """
        watch = self.config.watchdog
        held = self.config.eval.timeout_s if any(self.seats.playing) else 0.0
        own = self.limits.longest_s + watch.warn_after if self._attempts else held
        await within(
            event.wait(), self._what_is_awaited, warn_after=watch.warn_after, fail_after=own + watch.fail_after
        )

    def settle(self, version: int) -> None:
        """The batch was trained (or skipped) and its weights are on every engine: its places are free."""
        self.ledger.settle(version)
        self.tasks.forget(self.ledger.alive())
        self._admitting.set()
        self._fill()

    async def drain(self) -> None:
        """Start no episode and wait until none is played; `settle` lets dispatching go on. Those that wait for a seat, and
        those that have to be played again, wait for that.
        """
        self.ledger.draining = True
        self._admitting.clear()
        await self._awaited(self._quiet)

    async def stop(self) -> None:
        """Cancel what runs, and start nothing any more; `abandon` then tells what was lost."""
        self._stopped = True
        running = [*self._episodes, *((self._reading,) if self._reading else ())]
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def held(self) -> HeldRollouts:
        """What a checkpoint of this moment has to keep."""
        return replace(self.ledger.held(), source=self.tasks.state())

    def abandon(self) -> list[Group]:
        """The groups that no batch took, for the record of a run that ends; without those whose task was never read."""
        groups, owed = self.ledger.abandon()
        n, version = self.config.rollout.n_samples, self.ledger.version
        for draw in owed:
            with suppress(NotReadYet), without_waiting():
                if task := self.tasks.at(draw):
                    groups.append(Group(draw, task, n, version, outcome="cancelled"))
        return groups

    @property
    def episodes_in_flight(self) -> int:
        return len(self._episodes)

    # ------------------------------------------------------------------ dispatching

    def _fill(self) -> None:
        """Start groups while there are places and their tasks are here; the others begin when theirs are read."""
        while not self._stopped and self._missing is None and (draw := self.ledger.next_to_start()) is not None:
            try:
                with without_waiting():
                    task = self.tasks.at(draw)
            except NotReadYet as missing:
                self._missing = missing
                self._reading = asyncio.create_task(self._read(missing))
                break
            group = self.ledger.start(draw, task)
            if group is not None:
                engine = self.seats.least_loaded(group.n)
                for sample in range(group.n):
                    self._launch(group, draw_order(self.config, self.limits, draw, sample, group.task, engine))
        self._closable = True
        self._changed.set()

    async def _read(self, missing: NotReadYet) -> None:
        """Fetch tasks, for as long as it takes: who waits for a batch has the bound."""
        try:
            while self._missing is not None:
                try:
                    await missing.read()
                    self._missing = None
                except InfrastructureError as error:
                    log.warning("%s: %s. It is asked again.", missing.what, error)
                    await asyncio.sleep(ASK_AGAIN_S)
        except Exception as error:  # the fault boundary of reading tasks: the run ends with it
            self._failure = self._failure or error
            self._changed.set()
        else:
            self._fill()

    def _launch(self, group: Group, order: EpisodeOrder) -> None:
        episode = asyncio.create_task(self._play(group, order))
        self._episodes.add(episode)
        episode.add_done_callback(self._over)

    def _over(self, episode: asyncio.Task[None]) -> None:
        self._episodes.discard(episode)
        if not episode.cancelled() and episode.exception() is not None:
            self._failure = self._failure or episode.exception()
        self._changed.set()

    async def _play(self, group: Group, order: EpisodeOrder) -> None:
        self.stages.enter(order.rollout_id, "waits for a seat (rollout.max-episodes, or its engine is full)")
        try:
            async with self.seats.one(order.engine, (order.draw, order.sample)):
                result = await self._with_retries(order)
        finally:
            self.stages.leave(order.rollout_id)
            self.seats.over(order.engine)
        self._errors.note(order, result)
        if self.ledger.end(group, result):
            self.tasks.note(group.draw, group.scores())
            self._fill()

    async def _with_retries(self, order: EpisodeOrder) -> EpisodeResult:
        """Infrastructure failures are repeated from reset with the same seeds; everything else is final."""
        retries = self.config.rollout.retries
        result = await self._attempt(order)
        for attempt in range(retries):
            if not result.retryable or result.error is None:
                break
            self._errors.lost(order, attempt + 1, result.error)
            result = await self._attempt(order)
        return result

    async def _attempt(self, order: EpisodeOrder) -> EpisodeResult:
        await self._admitted(order)
        self.stages.enter(order.rollout_id, PLAYED)
        if not self._attempts:
            self._changed.set()  # another bound holds from now on for who awaits a batch
        self._attempts += 1
        self._quiet.clear()
        try:
            return await play_once(self.player, order)
        finally:
            self._attempts -= 1
            self._changed.set()
            if not self._attempts:
                self._quiet.set()

    async def _admitted(self, order: EpisodeOrder) -> None:
        """The engine is there and no update is waiting for episodes to end."""
        while True:
            self.stages.enter(order.rollout_id, "waits for a weight update")
            await self._admitting.wait()
            if self._ready is not None:
                self.stages.enter(order.rollout_id, f"waits for engine {order.engine}, which is being replaced")
                await self._ready(order.engine)
            if self._admitting.is_set():
                return

    # ------------------------------------------------------------------ taking

    def _take(self) -> Batch | None:
        """The next batch. Nothing is looked at again before a group has finished or a version was published."""
        if not self._closable:
            return None
        self._closable = False
        if self.ledger.drop_stale():
            self._fill()
        batch = self.ledger.take()
        if batch is None:
            return None
        self._errors.reset()
        groups, wanted = len(batch.groups), self.config.train.batch_groups
        if groups < wanted:
            log.warning("exhausted: the last batch has %d of %d groups", groups, wanted)
        return batch

    def _check_filter(self) -> None:
        filtered = sum(group.outcome == "filtered" for group in self.ledger.dropped)
        most = self.config.algo.filter.max_rounds * self.config.train.batch_groups
        if filtered and filtered >= most:
            raise RunStoppedError(
                f"the group filter dropped {filtered} groups for one batch (algo.filter.max-rounds x train.batch-groups): "
                "their scores are all equal or outside algo.filter.range. Widen the range, make the tasks harder or easier, "
                "or pass --algo.filter.enable False."
            )

    def groups(self) -> list[dict[str, Any]]:
        """Every group that holds a place and what it waits for, as plain values."""
        waiting = [
            self.stages.of_group(group, "finished, waits for its batch" if group.finished else "in flight")
            for group in self.ledger.groups
        ]
        return [*waiting, *(self.stages.of_group(group, "in training") for group in self.ledger.training)]

    def _what_is_awaited(self) -> str:
        flying = [group for group in self.groups() if group["episodes"]]
        shown = ". ".join(in_words(group) for group in flying[:SHOWN])
        missing = "" if self._missing is None else f"; {self._missing}"
        return f"a batch; in flight: {shown or 'nothing'}{missing}"
