"""Who may start and what may be trained, as functions of plain values.

A group holds one of `(max_staleness + 1) * batch_groups` places from its dispatch until the weights of the update it was
trained in are on every engine, or until it fails or is filtered. Giving the place back when the batch is taken would break
the staleness bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupState:
    """A group that holds a place and is not being trained. `version` = the engines' at its dispatch."""

    draw: int
    version: int
    finished: bool


@dataclass(frozen=True)
class RolloutState:
    """All that the decisions look at. `groups` are in order of dispatch; `training` counts groups of the batch being trained;
    `wanted` = groups the run still has to train, those included (None = no end). `masked` = the trainer leaves out tokens
    that are too old, so no batch is held back for them.
    """

    version: int
    batch_groups: int
    max_staleness: int
    groups: Sequence[GroupState]
    training: int
    wanted: int | None = None
    exhausted: bool = False
    draining: bool = False
    masked: bool = False

    @property
    def places(self) -> int:
        places = (self.max_staleness + 1) * self.batch_groups
        return places if self.wanted is None else min(places, self.wanted)


def may_dispatch(state: RolloutState) -> bool:
    """Whether one more group may start now."""
    held = len(state.groups) + state.training
    return not state.exhausted and not state.draining and held < state.places


def close_batch(state: RolloutState) -> list[int] | None:
    """Draws of the next batch, oldest dispatch first; None = wait.

    The batch is closed only if what it leaves can still be trained in time: with age = versions since dispatch, for every
    j = 0..max_staleness at most j * batch_groups of the groups left over have age >= max_staleness - j. A short batch is
    closed when the data is used up and nothing is in flight.
    """
    finished = [group for group in state.groups if group.finished]
    if len(finished) < state.batch_groups:
        last = state.exhausted and len(finished) == len(state.groups)
        return [group.draw for group in finished] if last and finished else None
    batch = {group.draw for group in finished[: state.batch_groups]}
    if state.masked:
        return sorted(batch)
    left = [state.version - group.version for group in state.groups if group.draw not in batch]
    for j in range(state.max_staleness + 1):
        if sum(age >= state.max_staleness - j for age in left) > j * state.batch_groups:
            return None
    return sorted(batch)
