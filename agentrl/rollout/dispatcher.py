"""Keeps the engines busy: starts groups while there are places, collects them, hands out batches.

Every scheduled episode comes out exactly once: finished or failed. The decisions are in `staleness.py`; this class does
the waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..config import Config
from ..engine import Limits, Sampling
from ..env import Task
from ..errors import AgentRLError, InfrastructureError
from ..group_statistics import keep_group
from ..seeds import env_seed, sampling_seed
from .episode import EpisodeOrder, EpisodeResult, failed
from .group import Group
from .staleness import GroupState, RolloutState, close_batch, may_dispatch
from .task_source import TaskSource
from .watchdog import within

log = logging.getLogger(__name__)


class Player(Protocol):
    """Plays episodes somewhere. Raises InfrastructureError when the place was lost."""

    async def play(self, order: EpisodeOrder) -> EpisodeResult: ...


class RunStoppedError(AgentRLError):
    """The run cannot go on; the message says why."""


@dataclass
class Batch:
    """Groups to train together, in order of dispatch, and the groups that ended since the last batch without training."""

    groups: list[Group]
    dropped: list[Group] = field(default_factory=list)


class Dispatcher:
    """One owner of the budget. `draws` bounds the task draws (None = as many as it takes), `wanted` the groups to train.

    Call `start`, then `next_batch` and `settle` in turns, then `stop`.
    """

    def __init__(
        self,
        config: Config,
        player: Player,
        tasks: TaskSource,
        limits: Limits,
        *,
        draws: int | None,
        wanted: int | None,
        filter_groups: bool,
        version: int = 0,
        next_draw: int = 0,
        reissue: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.player = player
        self.tasks = tasks
        self.limits = limits
        self.draws = draws
        self.wanted = wanted
        self.filter_groups = filter_groups
        self.version = version
        self.next_draw = next_draw
        self._reissue = sorted(reissue)
        self._groups: dict[int, Group] = {}
        self._training: list[Group] = []
        self._dropped: list[Group] = []
        self._tally: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._draining = False
        self._out_of_tasks = False
        self._failure: BaseException | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._seats = asyncio.Semaphore(config.rollout.max_episodes or 2**31)
        self._loop_task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ what the loop calls

    def start(self) -> None:
        """Begin to dispatch."""
        self._loop_task = asyncio.create_task(self._keep_dispatching())
        self._loop_task.add_done_callback(self._note_failure)

    async def next_batch(self) -> Batch | None:
        """The next batch as soon as the staleness rule lets it be closed; None when the data is used up.

        Raises what broke the dispatcher, RunStoppedError when too many episodes fail or no group passes the filter, and
        InfrastructureError when no episode ends for watchdog.fail_after. A caller that is cancelled has taken no batch.
        """
        watch = self.config.watchdog
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            self._check_error_rate()
            draws = close_batch(self._state())
            if draws is not None:
                return self._take(draws)
            if self._exhausted() and not self._groups:
                return Batch([], self._take_dropped()) if self._dropped else None
            await within(
                self._changed.wait(), self._what_is_awaited, warn_after=watch.warn_after, fail_after=watch.fail_after
            )

    def settle(self, version: int) -> None:
        """The batch was trained (or skipped) and its weights are on every engine: its places are free."""
        if self.wanted is not None:
            self.wanted -= len(self._training)
        self._training = []
        self._draining = False
        self.version = version
        self._wake.set()
        self._changed.set()

    async def drain(self) -> None:
        """Start nothing new and wait until no episode runs; `settle` lets dispatching go on."""
        self._draining = True
        if not self._running:
            return
        watch = self.config.watchdog
        over = asyncio.wait(set(self._running))
        await within(over, self._what_is_awaited, warn_after=watch.warn_after, fail_after=watch.fail_after)

    async def stop(self) -> None:
        """Cancel what runs; `abandon` then tells what was lost."""
        tasks = [task for task in (*self._running, self._loop_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def abandon(self) -> list[Group]:
        """The groups that were in flight, waiting or in training, for the record of a run that ends. Those that had ended
        without training keep their outcome; the others are cancelled.
        """
        for group in (*self._groups.values(), *self._training):
            group.outcome = "cancelled"
        left = [*self._groups.values(), *self._training, *self._dropped]
        self._groups, self._training, self._dropped = {}, [], []
        return left

    def outstanding(self) -> list[int]:
        """Draws that no batch has settled yet, ended ones without a record included: a resumed run issues them again, first."""
        taken = (group.draw for group in (*self._training, *self._dropped))
        return sorted([*self._groups, *self._reissue, *taken])

    @property
    def episodes_in_flight(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------------ dispatching

    def _state(self) -> RolloutState:
        groups = [GroupState(g.draw, g.version, g.finished) for g in self._groups.values()]
        train = self.config.train
        return RolloutState(
            self.version,
            train.batch_groups,
            train.max_staleness,
            groups,
            len(self._training),
            self.wanted,
            self._exhausted(),
            self._draining,
            self.config.rollout.mask_stale_tokens,
        )

    def _exhausted(self) -> bool:
        ended = self._out_of_tasks or (self.draws is not None and self.next_draw >= self.draws)
        return ended and not self._reissue

    async def _keep_dispatching(self) -> None:
        while True:
            while may_dispatch(self._state()):
                self._dispatch()
            if self._exhausted():
                self._changed.set()
            self._wake.clear()
            await self._wake.wait()

    def _dispatch(self) -> None:
        draw = self._reissue.pop(0) if self._reissue else self.next_draw
        task = self.tasks.at(draw)
        if task is None:
            self._out_of_tasks = True
            return
        self.next_draw = max(self.next_draw, draw + 1)
        group = Group(draw, task, self.config.rollout.n_samples, self.version)
        self._groups[draw] = group
        for sample in range(group.n):
            episode = asyncio.create_task(self._play(group, self._order(draw, task, sample)))
            self._running.add(episode)
            episode.add_done_callback(self._running.discard)
            episode.add_done_callback(self._note_failure)

    def _order(self, draw: int, task: Task, sample: int) -> EpisodeOrder:
        run, rollout = self.config.run, self.config.rollout
        group_id = f"{draw:06d}"
        return EpisodeOrder(
            rollout_id=f"{group_id}-{sample}",
            group_id=group_id,
            draw=draw,
            sample=sample,
            task=task,
            env_seed=env_seed(run.seed, draw),
            seed=sampling_seed(run.seed, draw, sample),
            sampling=Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens),
            limits=self.limits,
            engine=draw % self.config.engine.count,
        )

    async def _play(self, group: Group, order: EpisodeOrder) -> None:
        async with self._seats:
            result = await self._with_retries(order)
        group.results.append(result)
        self._tally["ended"] += 1
        if result.error is not None:
            self._tally["failed"] += 1
            what = (result.env or "env unknown", order.task.id, order.rollout_id)
            log.warning("%s, task %s: episode %s failed: %s", *what, result.error["traceback"])
        if group.finished:
            self._finish(group)
        self._changed.set()

    async def _with_retries(self, order: EpisodeOrder) -> EpisodeResult:
        """Infrastructure failures are repeated from reset with the same seeds; everything else is final."""
        for attempt in range(self.config.rollout.retries + 1):
            try:
                result = await self.player.play(order)
            except InfrastructureError as error:
                result = failed(order, error)
            if not result.retryable:
                break
            if attempt < self.config.rollout.retries:
                log.warning("episode %s: attempt %d lost: %s", order.rollout_id, attempt + 1, result.error)
        return result

    def _finish(self, group: Group) -> None:
        """All members are back: the group waits for a batch, or gives its place up."""
        limits = self.config.algo.filter.range or (None, None)
        if not group.valid:
            self._drop(group, "failed")
        elif self.filter_groups and not keep_group(group.scores(), *limits):
            self._drop(group, "filtered")

    def _drop(self, group: Group, outcome: str) -> None:
        group.outcome = outcome
        del self._groups[group.draw]
        self._dropped.append(group)
        self._wake.set()

    # ------------------------------------------------------------------ taking

    def _take(self, draws: list[int]) -> Batch:
        groups = [self._groups.pop(draw) for draw in draws]
        for group in groups:
            group.outcome = "trained"
        self._training = groups
        self._tally.clear()
        if len(groups) < self.config.train.batch_groups:
            log.warning("exhausted: the last batch has %d of %d groups", len(groups), self.config.train.batch_groups)
        return Batch(groups, self._take_dropped())

    def _take_dropped(self) -> list[Group]:
        dropped, self._dropped = self._dropped, []
        return dropped

    # ------------------------------------------------------------------ when things go wrong

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._changed.set()

    def _check_error_rate(self) -> None:
        rollout = self.config.rollout
        ended, lost = self._tally["ended"], self._tally["failed"]
        if ended >= max(8, rollout.n_samples) and lost > rollout.max_error_rate * ended:
            raise RunStoppedError(
                f"{lost} of the last {ended} episodes failed, more than rollout.max_error_rate = "
                f"{rollout.max_error_rate:g} allows. The last one: {self._last_error()}"
            )
        filtered = sum(group.outcome == "filtered" for group in self._dropped)
        most = self.config.algo.filter.max_rounds * self.config.train.batch_groups
        if filtered and filtered >= most:
            raise RunStoppedError(
                f"the group filter dropped {filtered} groups for one batch (algo.filter.max-rounds x train.batch-groups): "
                "their scores are all equal or outside algo.filter.range. Widen the range, make the tasks harder or easier, "
                "or pass --algo.filter.enable False."
            )

    def _last_error(self) -> str:
        groups = [*self._groups.values(), *self._dropped]
        errors = [result.error for group in groups for result in group.results if result.error]
        return f"{errors[-1]['class']}: {errors[-1]['message']}" if errors else "unknown"

    def _what_is_awaited(self) -> str:
        waiting = [group for group in self._groups.values() if not group.finished]
        shown = ", ".join(f"group {g.draw:06d} ({len(g.results)}/{g.n} episodes)" for g in waiting[:4])
        return f"a batch; in flight: {shown or 'nothing'}"
