"""Conventions 1 to 7, one or more tests each, against sums worked out by hand or by a loop that reads like the text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentrl.trainers import PRESETS, aggregate, compute_advantages, policy_loss, whiten
from agentrl.trainers.batch import cut_rollouts
from torch import Tensor

from agentrl import ConfigError
from agentrl.cli.train import algorithm_facts
from agentrl.config import Config
from agentrl.config.checks import check_training

from .rollouts import make_row, make_rows

torch.set_num_threads(1)
NAN = math.nan
GROUPED = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
ALL = ("gae", "reinforce", *GROUPED)


def assert_close(got: Any, want: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float32), torch.as_tensor(want, dtype=torch.float32), atol=atol, rtol=1e-5
    )


def one_token(name: str, rewards: list[float], **options: Any) -> list[float]:
    """Advantages of rollouts of one token each."""
    mask = torch.ones(len(rewards), 1)
    return compute_advantages(name, torch.tensor(rewards), mask, **options).advantages[:, 0].tolist()


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ALL)
def test_convention_01_time_is_counted_in_trained_tokens(name: str, garbage: float) -> None:
    """An observation of any length between two decisions costs no discount, no lambda, no value and no KL."""
    dense = {"values": torch.rand(2, 3), "kl": torch.rand(2, 3)}
    rewards, options = torch.tensor([1.0, 0.0]), {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.3}
    want = compute_advantages(name, rewards, torch.ones(2, 3), **dense, **options)
    slots = [1, 2, 40]
    sparse = {key: torch.full((2, 50), garbage) for key in dense}
    mask = torch.zeros(2, 50)
    mask[:, slots] = 1
    for key, x in dense.items():
        sparse[key][:, slots] = x
    got = compute_advantages(name, rewards, mask, **sparse, **options)
    assert torch.equal(got.advantages[:, slots], want.advantages) and torch.equal(got.returns[:, slots], want.returns)
    assert got.advantages.count_nonzero() == want.advantages.count_nonzero()


def to_go(rewards: list[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1}, as the text has it."""
    result: list[float] = []
    for reward in reversed(rewards):
        result.append(reward + gamma * (result[-1] if result else 0.0))
    return result[::-1]


def whitened(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return [(v - mean) / std for v in values]


def test_convention_02_reinforce_is_the_whitened_return_to_go_and_its_gradient() -> None:
    """r_t = -coef kl_t, + R at the last trained token; on policy the loss's gradient is -A / trained tokens."""
    kl = torch.tensor([[0.5, NAN, 0.1, 0.2], [0.3, 0.4, NAN, NAN]])
    mask = ~kl.isnan()
    options = {"kl": kl, "kl_coef": 0.5, "gamma": 0.9}
    got = compute_advantages("reinforce", torch.tensor([2.0, -1.0]), mask, **options)
    returns = to_go([-0.25, -0.05, -0.1 + 2.0], 0.9) + to_go([-0.15, -0.2 - 1.0], 0.9)
    assert_close(got.returns[mask], returns)
    assert_close(got.advantages[mask], whitened(returns))
    logp = torch.where(mask, -1.0, NAN).requires_grad_()
    policy_loss(logp, logp.detach(), got.advantages, mask).loss.backward()
    assert logp.grad is not None
    assert_close(logp.grad[mask], [-a / 5 for a in whitened(returns)])
    assert not logp.grad[~mask].any()


def test_convention_03_whitening_is_over_the_trained_tokens_of_valid_rollouts() -> None:
    """Population std; a long rollout weighs more; the rollout without verdict not at all; returns stay as they were."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]])
    got = compute_advantages("reinforce", torch.tensor([1.0, 5.0, NAN]), mask)
    assert_close(got.advantages[mask.bool()], [*whitened([1.0, 1.0, 1.0, 5.0]), 0, 0, 0])
    assert_close(got.returns, [[1, 1, 1], [5, 0, 0], [0, 0, 0]])
    by_default = {name: compute_advantages(name, *_two(), values=torch.zeros(2, 1)).advantages.sum() for name in ALL}
    plain = {
        name: compute_advantages(name, *_two(), values=torch.zeros(2, 1), whiten=False).advantages.sum() for name in ALL
    }
    assert {name for name in ALL if by_default[name] != plain[name]} == {"gae", "reinforce"}
    three = torch.tensor([3.0, 0.0, 0.0]), torch.ones(3, 1)
    assert compute_advantages("reinforce_baseline", *three).advantages[0, 0] == pytest.approx(math.sqrt(2))


def _two() -> tuple[Tensor, Tensor]:
    return torch.tensor([3.0, 1.0]), torch.ones(2, 1)


@pytest.mark.parametrize("count", [7, 10, 33])
def test_convention_03_equality_is_tested_on_max_minus_min(count: int) -> None:
    """The computed std of equal float32 numbers need not be 0: dividing by it would make a signal of nothing."""
    x = torch.full((1, count), 0.1)
    assert not whiten(x, torch.ones_like(x)).any()
    x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(1.0))
    assert whiten(x, torch.ones_like(x))[0, 0] > 1


def test_convention_03_one_whitening_for_all_updates_of_a_batch(make_trainer: Callable[..., Any]) -> None:
    rows = make_rows()
    whole, cut = (make_trainer(train={"updates_per_batch": k}).train(rows, 0) for k in (1, 3))
    for one, other in zip(whole.advantages, cut.advantages, strict=True):
        assert (one == other).all()
    assert cut.metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)


def test_convention_04_the_group_baselines() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    others = [0.5 / 3, 0.5, 1.0 / 3, 0.5]
    std = math.sqrt(sum((r - 0.375) ** 2 for r in rewards) / 3)
    assert_close(one_token("dr_grpo", rewards), [r - 0.375 for r in rewards])
    assert_close(one_token("rloo", rewards), [r - o for r, o in zip(rewards, others, strict=True)])
    assert_close(one_token("grpo", rewards), [(r - 0.375) / (std + 1e-6) for r in rewards])
    assert_close(one_token("reinforce_baseline", rewards, whiten=False), [r - 0.375 for r in rewards])
    assert_close(one_token("reinforce_baseline", rewards), whitened(rewards))
    discounted = compute_advantages("reinforce_baseline", torch.tensor([1.0, 0.0]), torch.ones(2, 3), gamma=0.5)
    assert_close(discounted.advantages, [[1.0] * 3, [-1.0] * 3])


@pytest.mark.parametrize("name", GROUPED)
def test_convention_04_equal_rewards_give_exactly_zero(name: str) -> None:
    for reward, count in ((0.1, 7), (1 / 3, 10), (-1e4 / 3, 33)):
        assert not any(one_token(name, [reward] * count))


@pytest.mark.parametrize(
    "preset", [preset for preset in PRESETS if preset.name != "ppo"], ids=lambda preset: preset.name
)
def test_convention_05_a_group_of_one_is_refused_at_start_up(preset: Any) -> None:
    config = Config.model_validate(
        {"env": {"name": "screenshot_math"}, "algo": {"name": preset.name}, "rollout": {"n_samples": 1}}
    )
    if preset.advantage in GROUPED:
        with pytest.raises(ConfigError, match=r"--rollout\.n-samples 1 must be at least 2"):
            check_training(config, algorithm_facts(config))
    else:
        check_training(config, algorithm_facts(config))


@pytest.mark.parametrize("name", GROUPED)
def test_convention_05_a_group_shrunk_to_one_is_no_verdict(name: str, make_trainer: Callable[..., Any]) -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 7.0, NAN]), [0, 0, 1, 1]
    got = compute_advantages(name, rewards, torch.ones(4, 2), group_ids=groups, whiten=True)
    assert got.valid.tolist() == [True, True, False, False]
    assert_close(got.advantages, [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    if name == "grpo":
        rows = [make_row(i, 20, group=f"g{i // 2}", reward=[1.0, 0.0, 7.0, None][i]) for i in range(4)]
        assert make_trainer(algo={"name": name}).train(rows, 0).metrics["groups/shrunk"] == 1.0


@pytest.mark.parametrize("name", ALL)
def test_convention_06_no_verdict_leaves_the_statistics_and_the_rest_stays(name: str) -> None:
    """No verdict, or nothing sampled: advantage 0 and not valid; the others are as if it had never been there."""
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 0]])
    rewards = torch.tensor([1.0, NAN, 50.0, 0.5])
    got = compute_advantages(name, rewards, mask, values=torch.zeros(4, 2))
    kept = [0, 3]
    alone = compute_advantages(name, rewards[kept], mask[kept], values=torch.zeros(2, 2))
    assert got.valid.tolist() == [True, False, False, True]
    assert not got.advantages[[1, 2]].any() and not got.returns[[1, 2]].any()
    assert_close(got.advantages[kept], alone.advantages)


def test_convention_06_what_has_no_verdict_is_counted(make_trainer: Callable[..., Any]) -> None:
    rows = [make_row(i, 20, reward=[1.0, 0.0, None][i]) for i in range(3)]
    assert make_trainer().train(rows, 0).metrics["rollouts/unused"] == 1.0


@pytest.mark.parametrize("name", ALL)
def test_convention_07_the_rows_of_a_rollout_are_one_sequence(name: str) -> None:
    """A change of row is crossed like an observation; R lands on the last trained token, wherever that is."""
    options = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.2}
    values, kl, rewards = torch.rand(2, 5), torch.rand(2, 5), torch.tensor([1.0, 0.25])
    whole = compute_advantages(name, rewards, torch.ones(2, 5), values=values, kl=kl, **options).advantages

    def cut(x: Tensor, fill: float) -> Tensor:
        """Rows a b a b a: three tokens, then two; the last row of the first rollout has none that is trained."""
        pad = torch.full((2, 1), fill)
        return torch.cat([x[:, :3], torch.cat([x[:, 3:], pad], 1), torch.full((1, 3), fill)])

    ids = ["a", "b", "a", "b", "a"]
    got = compute_advantages(
        name,
        torch.tensor([1.0, 0.25, 1.0, 0.25, 1.0]),
        cut(torch.ones(2, 5), 0.0),
        rollout_ids=ids,
        values=cut(values, NAN),
        kl=cut(kl, NAN),
        **options,
    )
    assert_close(got.advantages, cut(whole, 0.0))
    assert got.valid.all()


def test_convention_07_statistics_and_means_are_over_rollouts() -> None:
    assert_close(one_token("dr_grpo", [1.0, 1.0, 1.0, 0.0], rollout_ids=[0, 0, 0, 1]), [0.5, 0.5, 0.5, -0.5])
    per_token = torch.tensor([[1.0, 2.0], [3.0, NAN], [10.0, NAN]])
    mean = aggregate(per_token, ~per_token.isnan(), "sequence_mean", rollout_ids=["a", "a", "b"])
    assert_close(mean, ((1 + 2 + 3) / 3 + 10) / 2)
    with pytest.raises(ValueError, match="rows of a rollout disagree on their reward"):
        one_token("rloo", [1.0, 0.5, 0.0], rollout_ids=[0, 0, 1])


def test_convention_07_updates_are_cut_between_rollouts() -> None:
    assert cut_rollouts(["a", "a", "b", "b", "c", "c"], [True] * 6, 3) == [[0, 1], [2, 3], [4, 5]]
    assert cut_rollouts(["a", "a", "a", "b"], [True] * 4, 2) == [[0, 1, 2], [3]]


def test_convention_07_gspo_has_one_ratio_a_row() -> None:
    logp = torch.tensor([[0.2, 0.4], [0.1, 0.1]])
    both = policy_loss(
        logp, torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2), level="sequence", rollout_ids=[0, 0]
    )
    assert both.metrics["ratio"].value == pytest.approx((math.exp(0.3) + math.exp(0.1)) / 2)
