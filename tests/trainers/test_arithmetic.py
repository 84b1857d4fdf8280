"""Filters, shaping, preference losses, KL control, pass@k, planned updates, metrics: plain values in and out."""

from __future__ import annotations

import math

import pytest
import torch
from agentrl.trainers import (
    Mean,
    averages,
    clip_rewards,
    compute_advantages,
    dpo_loss,
    entropy,
    keep_group,
    kl_controller,
    merge,
    overlong_penalty,
    pass_at_k,
    planned_updates,
    policy_loss,
    reward_model_loss,
    stop_properly,
    token_logprobs,
    whiten,
)

torch.set_num_threads(1)
NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "keep"),
    [
        ([0.5, 0.5, 0.5, 0.5], False),
        ([1, 0, 0, 0], True),
        ([1, 1, 1, 0], True),
        ([0.1] * 33, False),
        ([0, 0, 0, 0], False),
        ([1, None, NAN, 0], True),
        ([1, None], False),
        ([], False),
    ],
)
def test_a_group_is_kept_iff_its_members_differ(scores: list[float | None], keep: bool) -> None:
    assert keep_group(scores) is keep


def test_the_range_of_the_filter_is_open_and_each_bound_optional() -> None:
    assert not keep_group([1, 0], low=0.5)
    assert not keep_group([1, 0], high=0.5)
    assert keep_group([1, 0], low=0.4) and keep_group([1, 0], high=0.6)
    assert keep_group(torch.tensor([1.0, 0.0]), low=0.4, high=0.6)


def test_pass_at_k_of_prompts_with_different_n_is_the_mean_of_theirs() -> None:
    assert (pass_at_k(6, 2, 3) + pass_at_k(6, 0, 3)) / 2 == pytest.approx(0.4)
    assert (pass_at_k(2, 1, 2) + pass_at_k(6, 2, 2)) / 2 == pytest.approx((1 + 0.6) / 2)
    assert pass_at_k(5, 5, 1) == 1.0 and pass_at_k(5, 0, 5) == 0.0


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_what_has_no_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_planned_updates_count_a_remainder_and_refuse_nothing() -> None:
    plan = {"prompts": 3, "n": 3, "train_batch": 4, "epochs": 1, "rollouts": 2, "episodes": 1}
    assert planned_updates(**plan) == 6
    with pytest.raises(ValueError, match="train_batch"):
        planned_updates(**(plan | {"train_batch": 0}))


def test_overlong_penalty_keeps_no_verdict_and_grows_with_the_factor() -> None:
    got = overlong_penalty(torch.tensor([NAN, 1.0]), torch.tensor([100, 90]), max_new=100, buffer=20, factor=2.0)
    assert got[0].isnan() and got[1] == 0.0
    for bad in ({"buffer": 0}, {"buffer": 101}, {"buffer": 5, "factor": -1.0}):
        with pytest.raises(ValueError):
            overlong_penalty(torch.zeros(1), torch.ones(1), max_new=100, **bad)


def test_stop_properly_multiplies_or_replaces_the_truncated() -> None:
    rewards, truncated = torch.tensor([1.0, 2.0, NAN]), torch.tensor([False, True, True])
    assert stop_properly(rewards, truncated, 0.5)[:2].tolist() == [1.0, 1.0]
    assert stop_properly(rewards, truncated, 0.0)[:2].tolist() == [1.0, 0.0]
    replaced = stop_properly(rewards, truncated, -1.0)
    assert replaced[:2].tolist() == [1.0, -1.0] and replaced[2].isnan()


def test_clip_rewards() -> None:
    got = clip_rewards(torch.tensor([-20.0, 0.5, 20.0, NAN]), -10, 10)
    assert got[:3].tolist() == [-10.0, 0.5, 10.0] and got[3].isnan()
    with pytest.raises(ValueError):
        clip_rewards(torch.zeros(1), 1, -1)


def test_adaptive_kl_moves_towards_its_target_in_bounded_steps() -> None:
    control = kl_controller(0.1, target=6.0, horizon=1000)
    control.update(kl=60.0, rollouts=100)
    assert control.coef == pytest.approx(0.1 * 1.02)
    control.update(kl=0.0, rollouts=100)
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.98)
    control.update(kl=6.0, rollouts=100)
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.98)


@pytest.mark.parametrize("horizon", [0.5, 10.0, 1000.0])
def test_an_adaptive_kl_of_any_horizon_rewards_no_divergence(horizon: float) -> None:
    """A batch larger than the horizon moves the coefficient by a fifth at most, never below 0."""
    control = kl_controller(0.1, target=0.05, horizon=horizon)
    for kl in (0.0, 9.0, 0.0, 0.0):
        before = control.coef
        control.update(kl, rollouts=128)
        assert 0.8 * before - 1e-9 <= control.coef <= 1.2 * before + 1e-9
        assert (control.coef > before) == (kl > 0.05)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_baseline", "reinforce"])
def test_rewards_of_any_size_that_float32_holds(name: str) -> None:
    """Statistics are made in float64: of [x, -x, 0] the advantages are finite, of opposite sign, and in the middle 0."""
    for x in (1.0, 1e20, 3e38):
        rewards = torch.tensor([x, -x, 0.0])
        got = compute_advantages(name, rewards, torch.ones(3, 2)).advantages
        assert got.isfinite().all() and got.dtype == torch.float32
        assert got[0, 1] == -got[1, 1] > 0 and abs(float(got[2, 1])) < 1e-6 * x
    if name == "grpo":
        assert got[0, 1].item() == pytest.approx(1.0)


def test_whitening_does_not_overflow() -> None:
    got = whiten(torch.tensor([3e38, -3e38, 0.0]), torch.ones(3))
    assert got.tolist() == pytest.approx([1.5**0.5, -(1.5**0.5), 0.0])


def test_fixed_kl_stays() -> None:
    control = kl_controller(0.1)
    control.update(kl=60.0, rollouts=100)
    assert control.coef == 0.1
    for bad in ({"coef": -0.1}, {"coef": 0.1, "target": 0.0}, {"coef": 0.1, "horizon": 0}):
        with pytest.raises(ValueError):
            kl_controller(**bad)


def test_a_metric_does_not_depend_on_the_cut() -> None:
    parts = [{"kl": Mean(6 * 0.2, 6)}, {"kl": Mean(2 * 0.8, 2)}, {}]
    assert averages(merge(parts))["kl"] == pytest.approx(0.35)
    rewards = [{"reward": Mean(1.0, 1)}, {"reward": Mean(0.0, 0)}, {"reward": Mean(0.0, 1)}]
    assert merge(rewards)["reward"] == Mean(1.0, 2) and averages(merge(rewards)) == {"reward": 0.5}
    assert averages({"never": Mean(0.0, 0)}) == {}


def test_the_metrics_of_micro_batches_merge_to_those_of_the_whole() -> None:
    torch.manual_seed(0)
    logp, old, advantages = (torch.randn(5, 7) for _ in range(3))
    mask = torch.rand(5, 7) < 0.5
    whole = policy_loss(logp, old, advantages, mask).metrics
    rows = [slice(i, i + 1) for i in range(5)]
    merged = merge(policy_loss(logp[r], old[r], advantages[r], mask[r]).metrics for r in rows)
    assert averages(merged) == pytest.approx(averages(whole))


def test_dpo_of_the_reference_itself_is_ln_2() -> None:
    x, y = torch.tensor([-3.0, -100.0]), torch.tensor([-4.0, -1.0])
    loss, metrics = dpo_loss(x, y, x, y)
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics["margin"] == Mean(0.0, 2) and metrics["accuracy"] == Mean(0, 2)


def test_dpo_gradient_goes_to_the_policy_only() -> None:
    tensors = [torch.tensor([-1.0], requires_grad=True) for _ in range(4)]
    dpo_loss(*tensors, beta=0.5).loss.backward()
    chosen, rejected, *reference = tensors
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.25) and rejected.grad.item() == pytest.approx(0.25)
    assert all(x.grad is None for x in reference)


def test_dpo_of_summed_answer_logprobs() -> None:
    zero = torch.zeros(1)
    got = dpo_loss(torch.tensor([0.3]), torch.tensor([-0.2]), zero, zero, beta=0.5).loss
    assert got.item() == pytest.approx(0.575939, abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"kind": "kto"}, {"beta": 0.0}, {"label_smoothing": 0.5}, {"kind": "ipo", "label_smoothing": 0.1}]
)
def test_dpo_refuses_what_it_does_not_know(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dpo_loss(*[torch.zeros(1)] * 4, **options)


def test_reward_model_metrics_count_pairs() -> None:
    loss, metrics = reward_model_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
    assert metrics["accuracy"] == Mean(1, 2) and metrics["margin"] == Mean(-1.0, 2)
    assert loss.item() == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(2))) / 2)


@pytest.mark.parametrize("margin", [1.0, torch.tensor(1), torch.tensor([1, 1])])
def test_the_margin_of_a_reward_model_may_be_one_number(margin: torch.Tensor | float) -> None:
    loss = reward_model_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), margin=margin).loss
    assert loss.item() == pytest.approx((math.log(2) + math.log1p(math.exp(3))) / 2)


def test_temperature_must_be_above_zero() -> None:
    for temperature in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature"):
            entropy(torch.zeros(3), temperature)
        with pytest.raises(ValueError, match="temperature"):
            token_logprobs(torch.zeros(1, 3), torch.zeros(1), temperature)


def test_entropy_with_impossible_tokens_is_finite_with_its_gradient() -> None:
    logits = torch.tensor([2.0, 1.0, -math.inf], requires_grad=True)
    got = entropy(logits)
    got.backward()
    p = 1 / (1 + math.exp(-1))
    assert got.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_supervised_loss_stays_at_temperature_1() -> None:
    assert -token_logprobs(torch.tensor([2.0, 1.0, 0.0]), torch.tensor(0)).item() == pytest.approx(0.407606, abs=1e-6)
