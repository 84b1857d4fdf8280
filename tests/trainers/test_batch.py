from __future__ import annotations

import math

import pytest
from agentrl.trainers.batch import _first_fit, attention_cost, cut_rollouts, micro_steps, plan_updates
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ConfigError


def test_updates_are_cut_between_rollouts() -> None:
    rollouts = ["a", "a", "b", "c", "c", "d", "e"]
    assert cut_rollouts(rollouts, [True] * 7, 2) == [[0, 1, 2], [3, 4, 5, 6]]
    assert cut_rollouts(rollouts, [True] * 7, 1) == [list(range(7))]


def test_rows_without_trained_tokens_are_left_out() -> None:
    assert cut_rollouts(["a", "a", "b"], [True, False, True], 1) == [[0, 2]]


def test_more_updates_than_rollouts_leaves_some_empty() -> None:
    plan = plan_updates(["a"], [5], [True], updates=3, budget=10)
    assert [update.rows for update in plan] == [(), (), (0,)]
    assert plan[0].steps == ()


def test_epochs_repeat_the_updates() -> None:
    plan = plan_updates(list("abcd"), [5] * 4, [True] * 4, updates=2, epochs=3, budget=100)
    assert [update.rows for update in plan] == [(0, 1), (2, 3)] * 3


def test_a_row_longer_than_a_micro_batch_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"row of 11 tokens.*--train\.micro-batch-tokens 10"):
        plan_updates(["a"], [11], [True], budget=10)
    assert plan_updates(["a", "b"], [11, 3], [False, True], budget=10)[0].rows == (1,)


def test_ranks_get_even_shares() -> None:
    assert micro_steps(range(4), [9, 1, 8, 2], ranks=2, budget=100) == (((0, 1), (2, 3)),)


def test_attention_makes_one_long_row_dearer_than_as_many_tokens_in_short_ones() -> None:
    lengths = [8, 4, 4, 4, 4]
    assert micro_steps(range(5), lengths, ranks=2, budget=100) == (((0, 3), (1, 2, 4)),)
    (step,) = micro_steps(range(5), lengths, ranks=2, budget=100, half_cost=2.0)
    assert set(step) == {(0,), (1, 2, 3, 4)}


def test_a_rank_may_have_nothing_to_do() -> None:
    assert micro_steps([7], [0] * 7 + [5], ranks=2, budget=100) == (((7,), ()),)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    budget=st.integers(50, 200),
    half_cost=st.sampled_from([math.inf, 10.0, 200.0]),
)
def test_every_row_once_within_the_budget_with_equal_steps(
    lengths: list[int], ranks: int, budget: int, half_cost: float
) -> None:
    steps = micro_steps(range(len(lengths)), lengths, ranks=ranks, budget=budget, half_cost=half_cost)
    batches = [batch for step in steps for batch in step]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in batch) <= budget for batch in batches)
    assert all(len(step) == ranks for step in steps)


@given(
    lengths=st.lists(st.sampled_from([3, 5, 7, 20, 50]), min_size=1, max_size=60),
    budget=st.integers(50, 120),
)
def test_rows_placed_by_length_stand_where_first_fit_puts_them_one_by_one(lengths: list[int], budget: int) -> None:
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins: list[list[int]] = []
    for row in order:
        roomy = [one for one in bins if sum(lengths[other] for other in one) + lengths[row] <= budget]
        if not roomy:
            bins.append([])
        (roomy or bins[-1:])[0].append(row)
    assert _first_fit(order, lengths, budget) == bins


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(2, 4),
    half_cost=st.sampled_from([math.inf, 10.0, 200.0]),
)
def test_costs_differ_by_no_more_than_one_row_where_the_budget_does_not_bind(
    lengths: list[int], ranks: int, half_cost: float
) -> None:
    (step,) = micro_steps(range(len(lengths)), lengths, ranks=ranks, budget=10_000, half_cost=half_cost)
    costs = [sum(attention_cost(lengths[row], half_cost) for row in batch) for batch in step]
    assert max(costs) - min(costs) <= max(attention_cost(length, half_cost) for length in lengths) + 1e-9
