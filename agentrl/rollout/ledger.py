"""Every group from its draw to its record: what runs, waits, is trained or has ended. Bookkeeping without waiting, at a cost
for each event that does not grow with the groups in flight.

Always: each draw below `next_draw` is in exactly one of: in flight or waiting, to be issued again, in training, ended
without a record, handed out for the record. A stale group is recorded and its draw issued again, so it is never lost.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config
from ..env import Task
from ..group_statistics import keep_group
from .episode import EpisodeResult
from .group import Batch, Group
from .staleness import GroupState, RolloutState, close_batch, held_up_by, may_dispatch, too_old


@dataclass(frozen=True)
class HeldRollouts:
    """What a checkpoint keeps: `reissue` = draws to issue again first; `groups` = finished and not trained (no outcome),
    or ended without a record (with one); `source` = the state of the task source.
    """

    next_draw: int = 0
    reissue: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    source: dict[str, Any] | None = None


def signal_filter(config: Config) -> Callable[[Group], bool]:
    """Whether a group carries a signal, by `algo.filter.range`."""
    low, high = config.algo.filter.range or (None, None)
    return lambda group: keep_group(group.scores(), low, high)


class GroupLedger:
    """`draws` bounds the task draws (None = as many as it takes), `wanted` the groups to train; `keep(group)` says
    whether a finished group with a verdict carries a signal.
    """

    def __init__(
        self,
        config: Config,
        *,
        draws: int | None,
        wanted: int | None,
        keep: Callable[[Group], bool],
        version: int = 0,
        held: HeldRollouts | None = None,
    ) -> None:
        held = held or HeldRollouts()
        self.version = version
        self.next_draw = held.next_draw
        self.dropped = [group for group in held.groups if group.outcome]
        self.draining = False
        self._train, self._rollout = config.train, config.rollout
        self._draws = draws
        self._wanted = wanted
        self._keep = keep
        self._reissue = sorted(held.reissue)
        self._groups = {group.draw: group for group in sorted(held.groups, key=lambda g: g.draw) if not group.outcome}
        self._training: list[Group] = []
        self._ended = self._finished = len(self._groups)
        self._newest = max(self._groups, default=-1)
        self._in_order = True
        self._held_up_by: int | None = None
        self._unchecked = list(self._groups.values())
        self._out_of_tasks = False
        self._again: set[int] = set()

    # ------------------------------------------------------------------ what is there

    @property
    def groups(self) -> list[Group]:
        """In flight or waiting, by draw."""
        return list(self._by_draw().values())

    def _by_draw(self) -> dict[int, Group]:
        if not self._in_order:
            self._groups = dict(sorted(self._groups.items()))
            self._in_order = True
        return self._groups

    @property
    def reissue(self) -> list[int]:
        """Draws to issue again, ascending."""
        return list(self._reissue)

    @property
    def training(self) -> list[Group]:
        return list(self._training)

    def alive(self) -> set[int]:
        """Draws that may still be played."""
        return {*self._groups, *self._reissue}

    @property
    def exhausted(self) -> bool:
        """No draw is left to start."""
        ended = self._out_of_tasks or (self._draws is not None and self.next_draw >= self._draws)
        return ended and not self._reissue

    @property
    def over(self) -> bool:
        """The data is used up and every group has been handed out."""
        return self.exhausted and not self._groups

    def state(self) -> RolloutState:
        return RolloutState(
            self.version,
            self._train.batch_groups,
            self._train.max_staleness,
            GroupStates(self._by_draw(), self._state_of),
            len(self._training),
            self._wanted,
            self.exhausted,
            self.draining,
            self._rollout.order,
            self._rollout.oversample,
            self._rollout.mask_stale_tokens,
            self._train.stale,
        )

    def _state_of(self, group: Group) -> GroupState:
        if not group.finished:
            return GroupState(group.draw, group.version, False)
        oldest, newest = group.versions()
        version = newest if self._rollout.mask_stale_tokens else oldest
        return GroupState(group.draw, version, True, group.ended, group.draw in self._again)

    def held(self) -> HeldRollouts:
        """What a checkpoint of this moment has to keep. Finished groups keep their episodes, the others begin again."""
        finished = [group for group in (*self._training, *self._groups.values()) if group.finished]
        running = [group.draw for group in self._groups.values() if not group.finished]
        return HeldRollouts(self.next_draw, tuple(sorted([*running, *self._reissue])), (*finished, *self.dropped))

    # ------------------------------------------------------------------ what happens

    def next_to_start(self) -> int | None:
        """The draw that may start now: those to be issued again first, then a new one."""
        if not may_dispatch(self.state()):
            return None
        return self._reissue[0] if self._reissue else self.next_draw

    def start(self, draw: int, task: Task | None) -> Group | None:
        """The draw of `next_to_start` takes its place; None as its task: the stream of tasks has ended."""
        if task is None:
            self._out_of_tasks = True
            self._reissue = [other for other in self._reissue if other != draw]
            return None
        if self._reissue and self._reissue[0] == draw:
            self._reissue.pop(0)
        self.next_draw = max(self.next_draw, draw + 1)
        self._groups[draw] = group = Group(draw, task, self._rollout.n_samples, self.version)
        if draw < self._newest:
            self._in_order, self._held_up_by = False, None
        self._newest = max(self._newest, draw)
        return group

    def end(self, group: Group, result: EpisodeResult) -> bool:
        """One member is back. True when it was the last: the group then waits for a batch, or gives its place up."""
        group.results.append(result)
        if not group.finished:
            return False
        self._ended += 1
        self._finished += 1
        group.ended = self._ended
        self._unchecked.append(group)
        if not group.valid:
            self._drop(group, "failed")
        elif not self._keep(group):
            self._drop(group, "filtered")
        return True

    def _drop(self, group: Group, outcome: str) -> None:
        group.outcome = outcome
        del self._groups[group.draw]
        self._finished -= 1
        self.dropped.append(group)

    def drop_stale(self) -> bool:
        """Finished groups over the bound end as stale and their draws are issued again, first. True if there were any."""
        waiting = {group.draw: group for group in self._unchecked if not group.outcome}
        self._unchecked = []
        old = too_old(replace(self.state(), groups=GroupStates(waiting, self._state_of)))
        for draw in old:
            self._drop(self._groups[draw], "stale")
            self._again.add(draw)
            bisect.insort(self._reissue, draw)
        return bool(old)

    def take(self) -> Batch | None:
        """The next batch if it can be closed and is wanted, else None. Its groups hold their places until `settle`."""
        if self._wanted == 0:
            return None
        enough = self._train.batch_groups if not self.exhausted else min(len(self._groups), self._train.batch_groups)
        if self._finished < enough or self._still_held_up():
            return None
        state = self.state()
        draws = close_batch(state)
        if draws is None:
            self._held_up_by = held_up_by(state)
            return None
        self._training = [self._groups.pop(draw) for draw in draws]
        self._finished -= len(draws)
        return Batch(self.training, self.take_dropped())

    def _still_held_up(self) -> bool:
        """The draw that held up the last attempt still does."""
        group = None if self._held_up_by is None else self._groups.get(self._held_up_by)
        return group is not None and not group.finished

    def take_dropped(self) -> list[Group]:
        """The groups that ended without training since the last call, for the record."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def settle(self, version: int) -> None:
        """The batch was trained (or skipped) and its weights are on every engine: its places are free."""
        if self._wanted is not None:
            self._wanted -= len(self._training)
        for group in self._training:
            group.outcome = "trained"
        self._again.difference_update(group.draw for group in self._training)
        self._training = []
        self._unchecked = [group for group in self._groups.values() if group.finished]
        self.draining = False
        self.version = version

    def abandon(self) -> tuple[list[Group], list[int]]:
        """(groups for the record of a run that ends, draws that were to be issued again). Groups that had ended keep
        their outcome, the others are cancelled. Nothing is left.
        """
        unfinished = [*self._groups.values(), *self._training]
        for group in unfinished:
            group.outcome = "cancelled"
        left, owed = [*unfinished, *self.dropped], self._reissue
        self._groups, self._training, self.dropped, self._reissue = {}, [], [], []
        self._finished, self._unchecked = 0, []
        return left, owed


class GroupStates:
    """Groups as the decisions see them, each made when it is looked at."""

    def __init__(self, groups: Mapping[int, Group], state_of: Callable[[Group], GroupState]) -> None:
        self._groups = groups
        self._state_of = state_of

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupState]:
        return map(self._state_of, self._groups.values())
