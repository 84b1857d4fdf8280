"""The conventions of compute_advantages, one named test each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from agentrl.trainers import Advantages, Decisions, compute_advantages, register_advantage, whiten
from agentrl.trainers.decisions import to_go
from torch import Tensor

torch.set_num_threads(1)
NAN = math.nan
GROUPED = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
ALL = ("gae", "reinforce", *GROUPED)


def column(name: str, rewards: list[float], **options: Any) -> Advantages:
    """Advantages of one-token rollouts."""
    values = torch.zeros(len(rewards), 1)
    return compute_advantages(name, torch.tensor(rewards), torch.ones(len(rewards), 1), values=values, **options)


def assert_close(got: Tensor, want: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float32), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ALL)
def test_masked_slots_are_never_read(name: str, garbage: float) -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]]).bool()
    clean = {key: torch.rand(2, 4) for key in ("values", "kl")}
    dirty = {key: torch.where(mask, x, garbage) for key, x in clean.items()}
    options = {"kl_coef": 0.3, "gamma": 0.9, "lam": 0.7}
    want = compute_advantages(name, torch.tensor([1.0, 0.0]), mask, **clean, **options)
    got = compute_advantages(name, torch.tensor([1.0, 0.0]), mask, **dirty, **options)
    assert torch.equal(got.advantages, want.advantages) and torch.equal(got.returns, want.returns)
    assert not got.advantages[~mask].any() and not got.returns[~mask].any()


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "gae"])
def test_masked_turn_rewards_are_never_read(name: str) -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]]).bool()
    turns = torch.where(mask, torch.rand(2, 4), NAN)
    options = {"values": torch.rand(2, 4)}
    want = compute_advantages(name, torch.zeros(2), mask, token_rewards=turns.nan_to_num(0.0), **options)
    got = compute_advantages(name, torch.zeros(2), mask, token_rewards=turns, **options)
    assert torch.equal(got.advantages, want.advantages)


@pytest.mark.parametrize("count", [2, 7, 10, 33])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("reward", [0.1, 0.3, -1e4 / 3, 1e-8])
def test_equal_rewards_give_exactly_zero(name: str, reward: float, count: int) -> None:
    assert not column(name, [reward] * count).advantages.any()


@pytest.mark.parametrize("name", ALL)
def test_whitening_of_equal_advantages_is_exactly_zero(name: str) -> None:
    assert not column(name, [0.1] * 33, whiten=True).advantages.any()


def test_whitening_keeps_a_spread_of_one_rounding_step() -> None:
    x = torch.full((1, 33), 0.1)
    x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(1.0))
    got = whiten(x, torch.ones_like(x))
    assert_close(got.mean(), 0.0)
    assert_close(got.std(correction=0), 1.0)
    assert got[0, 0] > 5


def test_whitening_does_not_overflow() -> None:
    got = whiten(torch.tensor([[1e30, -1e30, NAN]]), torch.tensor([[1, 1, 0]]))
    assert_close(got, [[1.0, -1.0, 0.0]])


def test_whitening_of_nothing_is_zero() -> None:
    assert not whiten(torch.full((2, 3), NAN), torch.zeros(2, 3)).any()


@pytest.mark.parametrize("name", ALL)
def test_whitening_is_the_default_of_gae_and_reinforce_only(name: str) -> None:
    rewards, expected = [3.0, 1.0, 0.0, 0.5], name in ("gae", "reinforce", "reinforce_baseline")
    default, asked = column(name, rewards), column(name, rewards, whiten=expected)
    assert torch.equal(default.advantages, asked.advantages)
    assert not torch.equal(default.advantages, column(name, rewards, whiten=not expected).advantages)


@pytest.mark.parametrize("name", ALL)
def test_returns_are_never_whitened(name: str) -> None:
    whitened, plain = (column(name, [3.0, 1.0, 0.0], whiten=w) for w in (True, False))
    assert torch.equal(whitened.returns, plain.returns)


def test_whitening_counts_tokens_of_valid_rollouts_only() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]])
    got = compute_advantages("reinforce", torch.tensor([1.0, 5.0, NAN]), mask)
    mean, std = 2.0, math.sqrt(3.0)
    assert_close(got.advantages, [[(1 - mean) / std] * 3, [(5 - mean) / std, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_with_one_valid_member_gives_no_signal(name: str) -> None:
    rewards, groups = [1.0, 0.0, 7.0, NAN, 9.0], [0, 0, 1, 1, 2]
    got = column(name, rewards, group_ids=groups)
    assert got.valid.tolist() == [True, True, False, False, False]
    alone = column(name, rewards[:2], group_ids=groups[:2])
    assert_close(got.advantages[:2], alone.advantages)
    assert not got.advantages[2:].any() and not got.returns[2:].any()


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_estimators_without_groups_take_single_rollouts(name: str) -> None:
    assert column(name, [1.0, 0.0], group_ids=[0, 1]).valid.all()


@pytest.mark.parametrize("name", ALL)
def test_nothing_sampled_is_like_no_verdict(name: str) -> None:
    mask = torch.tensor([[1, 1], [0, 0], [1, 1], [1, 0]])
    values = torch.rand(4, 2)
    empty = compute_advantages(name, torch.tensor([1.0, 50.0, 0.0, 0.5]), mask, values=values)
    judged = compute_advantages(name, torch.tensor([1.0, NAN, 0.0, 0.5]), mask, values=values)
    assert empty.valid.tolist() == [True, False, True, True]
    assert torch.equal(empty.advantages, judged.advantages)


@pytest.mark.parametrize("name", ALL)
def test_nothing_valid_at_all(name: str) -> None:
    for mask in (torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 0), torch.zeros(0, 3)):
        got = compute_advantages(name, torch.full((len(mask),), NAN), mask, values=torch.zeros(mask.shape))
        assert got.advantages.shape == got.returns.shape == mask.shape
        assert not got.advantages.any() and not got.valid.any()


@pytest.mark.parametrize("name", ALL)
def test_the_rows_of_a_rollout_are_one_sequence(name: str) -> None:
    options = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.2}
    one = {key: torch.rand(2, 6) for key in ("values", "kl")}
    bootstrap = torch.tensor([0.7, 0.3])
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1]])
    whole = compute_advantages(name, torch.tensor([1.0, 0.0]), mask, bootstrap=bootstrap, **one, **options)

    cut = {key: torch.cat([x[:, :3], x[:, 3:]]) for key, x in one.items()}
    rows = torch.tensor([NAN, NAN, 0.7, 0.3])
    cut_mask = torch.cat([mask[:, :3], mask[:, 3:]])
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    ids = {"rollout_ids": ["a", "b", "a", "b"]}
    got = compute_advantages(name, rewards, cut_mask, bootstrap=rows, **ids, **cut, **options)
    for part, full in zip(got[:2], whole[:2], strict=True):
        assert_close(part, torch.cat([full[:, :3], full[:, 3:]]))
    assert got.valid.all()


def test_a_last_row_without_trained_tokens_gets_no_reward_and_no_bootstrap() -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    got = compute_advantages(
        "gae",
        torch.tensor([2.0, 2.0]),
        mask,
        rollout_ids=[5, 5],
        values=torch.zeros(2, 2),
        bootstrap=torch.tensor([10.0, NAN]),
        whiten=False,
    )
    assert_close(got.advantages, [[12.0, 12.0], [0.0, 0.0]])
    assert got.valid.tolist() == [True, True]


def test_group_statistics_count_rollouts_not_rows() -> None:
    got = column("dr_grpo", [1.0, 1.0, 1.0, 0.0], rollout_ids=[0, 0, 0, 1])
    assert_close(got.advantages[:, 0], [0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("rewards", [[1.0, 0.5], [1.0, NAN], [NAN, 1.0]])
def test_rows_that_disagree_on_the_reward_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="disagree on their reward"):
        column("reinforce", rewards, rollout_ids=[0, 0])


def test_rows_that_disagree_on_the_group_are_refused() -> None:
    with pytest.raises(ValueError, match="disagree on their group"):
        column("rloo", [1.0, 1.0, 0.0], rollout_ids=[0, 0, 1], group_ids=[0, 1, 1])


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        column("reinforce", [math.inf, 0.0])


def test_wrong_number_of_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ids for 2 rows"):
        column("rloo", [1.0, 0.0], group_ids=[0, 0, 0])


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_baseline"])
def test_kl_in_the_reward_is_summed_to_go_after_the_group_statistics(name: str) -> None:
    mask, kl = torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.tensor([[0.1, 9.0, 0.2], [0.3, 0.4, 0.5]])
    rewards, options = torch.tensor([1.0, 0.0]), {"whiten": False, "gamma": 0.5}
    plain = compute_advantages(name, rewards, mask, **options).advantages
    with_kl = compute_advantages(name, rewards, mask, kl=kl, kl_coef=0.5, **options).advantages
    assert_close(plain - with_kl, [[0.15, 0.0, 0.1], [0.6, 0.45, 0.25]])


def test_reinforce_baseline_by_turn_subtracts_the_mean_sum_at_the_last_token() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    turns = torch.tensor([[1.0, NAN, 2.0], [0.0, 1.0, NAN]])
    got = compute_advantages("reinforce_baseline", torch.zeros(2), mask, token_rewards=turns, whiten=False)
    assert_close(got.advantages, [[1.0, 0.0, 0.0], [-1.0, -1.0, 0.0]])


def test_turn_rewards_of_a_rollout_without_verdict_do_not_count() -> None:
    turns = torch.tensor([[5.0], [1.0], [0.0]])
    got = compute_advantages("reinforce", torch.tensor([NAN, 0.0, 0.0]), torch.ones(3, 1), token_rewards=turns)
    assert_close(got.advantages[:, 0], [0.0, 1.0, -1.0])
    assert got.valid.tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
def test_outcome_estimators_refuse_turn_rewards(name: str) -> None:
    with pytest.raises(ValueError, match="token_rewards"):
        column(name, [1.0, 0.0], token_rewards=torch.zeros(2, 1))


def test_missing_arguments_are_refused() -> None:
    rewards, mask = torch.zeros(2), torch.ones(2, 3)
    with pytest.raises(ValueError, match="gae needs values"):
        compute_advantages("ppo", rewards, mask)
    with pytest.raises(ValueError, match="kl_coef without kl"):
        compute_advantages("reinforce", rewards, mask, kl_coef=0.1)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Did you mean (dr_)?grpo"):
        column("grpoo", [1.0, 0.0])


def test_kl_coefficient_zero_does_not_read_kl() -> None:
    assert not column("reinforce", [1.0, 1.0], kl=torch.full((2, 1), NAN)).advantages.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_maths_is_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    values = torch.rand(2, 3).to(dtype)
    rewards, mask = torch.tensor([1.0, 0.0]), torch.ones(2, 3)
    got = compute_advantages("gae", rewards.to(dtype), mask, values=values)
    want = compute_advantages("gae", rewards, mask, values=values.float())
    assert got.advantages.dtype == torch.float32
    assert torch.equal(got.advantages, want.advantages)


def test_nothing_is_differentiated() -> None:
    values = torch.rand(2, 3, requires_grad=True)
    got = compute_advantages("gae", torch.zeros(2), torch.ones(2, 3), values=values)
    assert not got.advantages.requires_grad and not got.returns.requires_grad


def test_an_estimator_of_one_s_own_takes_one_function() -> None:
    @register_advantage("half_of_the_return", whiten=False)
    def half(d: Decisions) -> Tensor:
        return torch.where(d.trained, d.at_end(d.rewards) / 2, NAN)

    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    got = compute_advantages("half_of_the_return", torch.tensor([4.0, 2.0]), mask)
    assert_close(got.advantages, [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])


def test_an_estimator_that_does_not_return_a_number_a_decision_is_told_so() -> None:
    register_advantage("of_a_rollout")(lambda d: d.rewards)
    with pytest.raises(ValueError, match=r"what of_a_rollout returns is \[2\].* must be \[2, 3\]"):
        compute_advantages("of_a_rollout", torch.ones(2), torch.ones(2, 3))


def test_infrastructure_failure_leaves_the_baseline() -> None:
    got = column("dr_grpo", [1.0, 0.0, NAN, 1.0])
    assert_close(got.advantages[:, 0], [1 - 2 / 3, -2 / 3, 0.0, 1 - 2 / 3])


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_sums_to_go(decay: float) -> None:
    x = torch.randn(3, 5)
    want = sum(decay**k * torch.nn.functional.pad(x, (0, k))[:, k:] for k in range(5))
    assert_close(to_go(x, decay), want, atol=1e-5)
    assert to_go(torch.zeros(2, 0), decay).shape == (2, 0) and to_go(torch.zeros(0, 3), decay).shape == (0, 3)


@pytest.mark.parametrize("name", ["values", "token_rewards", "kl", "bootstrap"])
def test_shapes_that_do_not_fit_the_mask_are_refused(name: str) -> None:
    given = {"values": torch.zeros(2, 3)} | {name: torch.zeros(2, 4)}
    with pytest.raises(ValueError, match=rf"{name} is \[2, 4\]"):
        compute_advantages("gae", torch.zeros(2), torch.ones(2, 3), **given)
    with pytest.raises(ValueError, match=r"rewards is \[3\]; to go with the others it must be \[2\]"):
        compute_advantages("reinforce", torch.zeros(3), torch.ones(2, 3))
