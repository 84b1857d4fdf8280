"""Who may start and what may be trained, as functions of plain values.

A group holds one of `places` from its dispatch until the weights of the update it was trained in are on every engine, or
until it fails, is filtered or is dropped. Giving the place back when the batch is taken would break the staleness bound.

With `(max_staleness + 1) * batch_groups` places and strict order nothing ever gets too old: a group with p others before
it is trained p // batch_groups versions later, and p < places. So for every j = 0..max_staleness, of the groups that a
batch leaves over at most j * batch_groups have an age (versions since dispatch) of max_staleness - j or more. `drop` and
the masking of stale tokens give that up; a group that gets too old then is dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Order = Literal["in_order", "first_done"]
Stale = Literal["wait", "drop"]


@dataclass(frozen=True)
class GroupState:
    """A group that holds a place and is not being trained.

    `version` = the engines' at its dispatch; of a finished group that of its oldest token, which counts against the
    bound (with masking of stale tokens: of its newest). `ended` = its rank among the finished; `again` = its draw got too
    old before.
    """

    draw: int
    version: int
    finished: bool
    ended: int = 0
    again: bool = False

    @property
    def turn(self) -> tuple[bool, int]:
        """First done, first taken; before them the oldest of those that were dropped, or the same ones might be so for ever."""
        return not self.again, self.draw if self.again else self.ended


class Groups(Protocol):
    """How many there are, and each in its turn."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[GroupState]: ...


@dataclass(frozen=True)
class RolloutState:
    """All that the decisions look at. `groups` are by draw, and looked at no further than needed: they may be made on the
    way. `training` counts groups of the batch being trained; `wanted` = groups the run still has to train, those included
    (None = no end). `masked` = the trainer leaves out tokens that are too old, so no batch is held back for them.
    """

    version: int
    batch_groups: int
    max_staleness: int
    groups: Groups
    training: int
    wanted: int | None = None
    exhausted: bool = False
    draining: bool = False
    order: Order = "in_order"
    oversample: float = 1.0
    masked: bool = False
    stale: Stale = "wait"

    @property
    def places(self) -> int:
        return places(self.batch_groups, self.max_staleness, self.wanted, self.oversample)


def places(batch_groups: int, max_staleness: int, wanted: int | None = None, oversample: float = 1.0) -> int:
    """Groups that may be in flight, waiting or in training at once."""
    most = (max_staleness + 1) * batch_groups
    most = most if wanted is None else min(most, wanted)
    return math.ceil(round(oversample * most, 6))


def may_dispatch(state: RolloutState) -> bool:
    """Whether one more group may start now. A synchronous run starts nothing between taking and publishing."""
    if state.exhausted or state.draining or (state.max_staleness == 0 and state.training):
        return False
    return len(state.groups) + state.training < state.places


def too_old(state: RolloutState) -> list[int]:
    """Draws of the finished groups that may not be trained any more."""
    return [g.draw for g in state.groups if g.finished and state.version - g.version > state.max_staleness]


def close_batch(state: RolloutState) -> list[int] | None:
    """Draws of the next batch; None = wait. Groups that are `too_old` must have been dropped.

    In order: the oldest draws that hold places, when all of them are finished; with `drop`, and where stale tokens are masked,
    the oldest of those that are. First done: the first to have finished, those that were dropped before them. A short batch is
    closed when the data is used up and nothing is in flight.
    """
    if held_up_by(state) is not None:
        return None
    finished: Iterable[GroupState] = (group for group in state.groups if group.finished)
    if state.order == "first_done":
        finished = sorted(finished, key=lambda group: group.turn)
    batch = list(itertools.islice(finished, state.batch_groups))
    short = len(batch) < state.batch_groups
    if not batch or (short and not (state.exhausted and len(batch) == len(state.groups))):
        return None
    return sorted(group.draw for group in batch)


def held_up_by(state: RolloutState) -> int | None:
    """The draw without which no batch can be closed, whatever else finishes: where none may get too old, the first of the
    oldest that is not finished. None = there is none such.
    """
    if state.masked or state.stale == "drop":
        return None
    oldest = itertools.islice(state.groups, state.batch_groups)
    return next((group.draw for group in oldest if not group.finished), None)
