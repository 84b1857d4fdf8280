"""The scheduling decisions on plain values."""

from __future__ import annotations

from agentrl.rollout.staleness import GroupState, RolloutState, close_batch, may_dispatch, places, too_old


def test_synchronous_runs_start_nothing_between_taking_and_publishing() -> None:
    state = RolloutState(version=3, batch_groups=4, max_staleness=0, groups=[], training=4)
    assert not may_dispatch(state)
    assert not may_dispatch(RolloutState(3, 4, 0, [], 4, oversample=2.0, stale="drop"))


def test_in_order_a_batch_is_the_oldest_draws_and_waits_for_them() -> None:
    late, done = GroupState(0, 0, False), [GroupState(1, 0, True), GroupState(2, 1, True), GroupState(3, 1, True)]
    assert close_batch(RolloutState(1, 2, 1, [late, *done], 0)) is None
    assert close_batch(RolloutState(1, 2, 1, [GroupState(0, 0, True), *done], 0)) == [0, 1]


def test_first_done_takes_what_ended_first() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, True, 3), GroupState(2, 0, True, 1), GroupState(3, 0, True, 2)]
    assert close_batch(RolloutState(0, 2, 1, groups, 0, order="first_done", stale="drop")) == [2, 3]


def test_with_drop_no_batch_waits_for_a_slow_group() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, True, 3), GroupState(2, 0, True, 1), GroupState(3, 0, True, 2)]
    assert close_batch(RolloutState(0, 2, 1, groups, 0)) is None
    assert close_batch(RolloutState(0, 2, 1, groups, 0, stale="drop")) == [1, 2]


def test_a_short_batch_is_closed_when_nothing_comes_any_more() -> None:
    groups = [GroupState(7, 0, True)]
    for order, stale in (("in_order", "wait"), ("in_order", "drop"), ("first_done", "drop")):
        rules = {"order": order, "stale": stale}
        assert close_batch(RolloutState(0, 2, 1, groups, 0, **rules)) is None
        assert close_batch(RolloutState(0, 2, 1, groups, 0, exhausted=True, **rules)) == [7]
        running = [*groups, GroupState(8, 0, False)]
        assert close_batch(RolloutState(0, 3, 1, running, 0, exhausted=True, **rules)) is None


def test_only_finished_groups_over_the_bound_are_too_old() -> None:
    groups = [GroupState(0, 2, True), GroupState(1, 3, True), GroupState(2, 0, False)]
    assert too_old(RolloutState(4, 2, 1, groups, 0)) == [0]


def test_places() -> None:
    assert places(4, 2) == 12
    assert places(10, 0, oversample=1.1) == 11
    assert places(3, 1, oversample=1.2) == 8
    assert places(4, 2, wanted=4) == 4
    assert places(4, 2, wanted=4, oversample=1.5) == 6


def test_nothing_is_waited_for_where_tokens_that_are_too_old_are_masked() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, True), GroupState(2, 1, True)]
    assert close_batch(RolloutState(1, 2, 1, groups, 0)) is None
    assert close_batch(RolloutState(1, 2, 1, groups, 0, masked=True)) == [1, 2]


def test_wanted_bounds_what_is_started_at_the_end_of_a_run() -> None:
    groups = [GroupState(0, 0, False), GroupState(1, 0, False)]
    assert not may_dispatch(RolloutState(0, 2, 1, groups, 0, wanted=2))
    assert may_dispatch(RolloutState(0, 2, 1, groups, 0, wanted=3))
