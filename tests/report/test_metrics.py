"""Metrics: what is averaged over what, and pass@k against its definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.report.metrics import (
    episode_metrics,
    evaluation_metrics,
    group_metrics,
    mean,
    pass_at_k,
    staleness_metrics,
)
from agentrl.rollout.group import Batch

from .builders import episode, group, row


def test_the_mean_of_nothing_is_none() -> None:
    assert mean([]) is None
    assert mean(iter([1, 2])) == 1.5


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(2, 1, k)


def test_rewards_are_over_episodes_with_a_verdict() -> None:
    found = episode_metrics([episode(1.0), episode(0.0), episode(None), episode(5.0, error="EnvError")])
    assert found["reward/mean"] == 0.5 and found["reward/std"] == 0.5 and found["reward/count"] == 2
    assert found["no_verdict"] == 1 and found["errors/EnvError"] == 1


def test_no_verdict_at_all_leaves_the_keys_out() -> None:
    found = episode_metrics([episode(None)])
    assert "reward/mean" not in found and "score/mean" not in found and "pass@1" not in found
    assert found["reward/count"] == 0


def test_lengths_turns_and_truncation_are_over_episodes_that_did_not_fail() -> None:
    results = [
        episode(None, rows=[row(3, 2), row(1, 4)], truncated=True),
        episode(1.0, rows=[row(5, 1)]),
        episode(error="EnvError", rows=[row(90)], truncated=True),
    ]
    found = episode_metrics(results)
    assert found["length/action"] == 4.5 and found["length/total"] == 8.0
    assert found["truncated"] == 0.5 and found["turns"] == 1.0


def test_pass_at_1_is_the_mean_over_groups() -> None:
    results = [episode(1.0, group="a"), episode(0.0, group="b"), episode(1.0, group="b"), episode(0.9, group="b")]
    assert episode_metrics(results)["pass@1"] == pytest.approx((1 + 1 / 3) / 2)


def test_a_score_of_its_own_counts_for_pass_at_1() -> None:
    assert episode_metrics([episode(0.1, score=1.0)])["pass@1"] == 1.0
    assert episode_metrics([episode(9.0, score=0.5)])["pass@1"] == 0.0


def test_env_metrics_are_over_the_episodes_that_have_them() -> None:
    results = [
        episode(metrics={"clicks": 2.0, "renderer/branches": 1.0, "errors/close": 1.0}),
        episode(metrics={"clicks": 4.0, "solved": 1.0, "renderer/branches": 2.0}),
        episode(),
        episode(error="EnvError", metrics={"clicks": 100.0}),
    ]
    found = episode_metrics(results)
    assert found["env/clicks"] == 3.0 and found["env/solved"] == 1.0
    assert found["renderer/branches"] == 3.0 and found["errors/close"] == 1.0
    assert "env/errors/close" not in found


def test_groups_are_counted_by_what_became_of_them() -> None:
    dropped = [group(outcome=outcome) for outcome in ("filtered", "filtered", "failed", "stale")]
    assert group_metrics([group()], dropped) == {
        "groups/trained": 1,
        "groups/filtered": 2,
        "groups/stale": 1,
        "groups/failed": 1,
    }


def test_staleness_is_that_of_the_oldest_trained_token_of_each_row() -> None:
    rows = [row(versions=[3, 4, 5]), row(version=5)]
    unjudged = episode(None, rows=[row(version=0)], sample=1)
    found = staleness_metrics(Batch([group(episode(rows=rows), unjudged)]).rows, 5)
    assert found == {
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "versions_per_row/mean": 2.0,
        "versions_per_row/max": 3.0,
    }


def test_staleness_of_nothing_trained_is_left_out() -> None:
    assert staleness_metrics([], 5) == {}
    assert staleness_metrics([row(0)], 5) == {}


def test_evaluation_is_per_task_then_over_tasks() -> None:
    results = [
        *(episode(float(i < 2), group="a", sample=i) for i in range(4)),
        *(episode(0.0, group="b", sample=i) for i in range(2)),
        episode(error="EnvError", group="b", sample=2),
    ]
    found = evaluation_metrics(results, [1, 2, 4, 8])
    assert found["pass@1"] == pytest.approx((0.5 + 0) / 2)
    assert found["pass@2"] == pytest.approx((5 / 6 + 0) / 2)
    assert found["pass@4"] == 1.0, "only task a has four samples"
    assert "pass@8" not in found
    assert found["episodes"] == 6 and found["excluded"] == 1
    assert found["reward/mean"] == pytest.approx(2 / 6)
