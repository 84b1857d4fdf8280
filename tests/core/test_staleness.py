"""The two scheduling decisions under any order of events: the bound, the places, and progress."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.staleness import GroupState, RolloutState, close_batch, may_dispatch


class Model:
    """A run of plain values: groups start, end and are taken as the decisions allow."""

    def __init__(self, batch_groups: int, max_staleness: int, total: int) -> None:
        self.batch_groups, self.max_staleness, self.total = batch_groups, max_staleness, total
        self.version = 0
        self.next_draw = 0
        self.started: dict[int, int] = {}
        self.finished: set[int] = set()
        self.training: list[int] = []
        self.trained: list[int] = []
        self.dropped: list[int] = []

    def state(self) -> RolloutState:
        groups = [GroupState(draw, version, draw in self.finished) for draw, version in self.started.items()]
        exhausted = self.next_draw >= self.total
        return RolloutState(
            self.version, self.batch_groups, self.max_staleness, groups, len(self.training), exhausted=exhausted
        )

    def dispatch(self) -> None:
        while may_dispatch(self.state()):
            self.started[self.next_draw] = self.version
            self.next_draw += 1
        held = len(self.started) + len(self.training)
        assert held <= (self.max_staleness + 1) * self.batch_groups

    def take(self) -> bool:
        draws = None if self.training else close_batch(self.state())
        if draws is None:
            return False
        for draw in draws:
            assert self.version - self.started.pop(draw) <= self.max_staleness
            self.finished.remove(draw)
        self.training = draws
        return True

    def settle(self) -> None:
        self.trained += self.training
        self.training = []
        self.version += 1

    def running(self) -> list[int]:
        return [draw for draw in self.started if draw not in self.finished]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), batch=st.integers(1, 4), staleness=st.integers(0, 4), total=st.integers(1, 40))
def test_every_group_is_trained_in_time_whatever_the_order(
    data: st.DataObject, batch: int, staleness: int, total: int
) -> None:
    model = Model(batch, staleness, total)
    model.dispatch()
    while len(model.trained) + len(model.dropped) < total:
        choices = [("end", draw) for draw in model.running()] + ([("settle", -1)] if model.training else [])
        if not model.training and model.take():
            continue
        assert choices, f"nothing can happen: {model.state()}"
        what, draw = data.draw(st.sampled_from(choices))
        if what == "settle":
            model.settle()
        elif data.draw(st.integers(0, 5)) == 0:
            del model.started[draw]
            model.dropped.append(draw)
        else:
            model.finished.add(draw)
        model.dispatch()
    assert sorted(model.trained + model.dropped) == list(range(total))


def test_synchronous_runs_start_nothing_between_taking_and_publishing() -> None:
    state = RolloutState(version=3, batch_groups=4, max_staleness=0, groups=[], training=4)
    assert not may_dispatch(state)


@pytest.mark.parametrize("version", [0, 10])
def test_a_resumed_run_admits_no_more_than_a_fresh_one(version: int) -> None:
    groups: list[GroupState] = []
    while may_dispatch(RolloutState(version, 4, 1, groups, 0)):
        groups.append(GroupState(len(groups), version, False))
    assert len(groups) == 8


def test_a_batch_waits_for_the_group_that_would_be_too_old_in_the_next() -> None:
    old = [GroupState(0, 0, False), GroupState(1, 0, True)]
    new = [GroupState(2, 1, True), GroupState(3, 1, True)]
    assert close_batch(RolloutState(1, 2, 1, [*old, *new], 0)) is None
    assert close_batch(RolloutState(1, 2, 1, [GroupState(0, 0, True), old[1], *new], 0)) == [0, 1]


def test_nothing_is_waited_for_where_tokens_that_are_too_old_are_masked() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, True), GroupState(2, 1, True)]
    assert close_batch(RolloutState(1, 2, 1, groups, 0)) is None
    assert close_batch(RolloutState(1, 2, 1, groups, 0, masked=True)) == [1, 2]


def test_wanted_bounds_what_is_started_at_the_end_of_a_run() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, False)]
    assert not may_dispatch(RolloutState(0, 2, 1, groups, 0, wanted=2))
    assert may_dispatch(RolloutState(0, 2, 1, groups, 0, wanted=3))
