"""Conventions 8 to 14: the loss, its gradient and its denominators; ratios, corrections, KL, temperature.

Convention 8 on two ranks is in test_group.py, convention 9 where rollouts are scheduled in tests/core/test_filter.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentrl.trainers import (
    correction_weights,
    entropy,
    kl_estimate,
    kl_loss,
    overlong_mask,
    policy_loss,
    token_logprobs,
)
from agentrl.trainers.objective import Objective
from torch import Tensor

from agentrl import ConfigError
from agentrl.cli.train import algorithm_facts
from agentrl.config import Config
from agentrl.config.checks import check_training

from .one_token import single
from .rollouts import distance, make_row, make_rows, weights

torch.set_num_threads(1)
NAN = math.nan
Make = Callable[..., Any]


def configured(**sections: Any) -> Config:
    return Config.model_validate({"env": {"name": "screenshot_math"}} | sections)


def refused(said: str, **sections: Any) -> None:
    config = configured(**sections)
    with pytest.raises(ConfigError, match=said):
        check_training(config, algorithm_facts(config))


# ---------------------------------------------------------------- 8


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_convention_08_the_denominator_is_that_of_the_update(mode: str, size: int) -> None:
    """Loss and gradient of an update do not depend on its cut into micro-batches, their order, or their padding."""
    torch.manual_seed(0)
    logp, old, advantages = (torch.randn(8, 5) for _ in range(3))
    mask = torch.rand(8, 5) < 0.6
    rollouts = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5])
    divisor = {"token_mean": float(mask.sum()), "sequence_mean": 6.0, "constant": 100.0}[mode]

    def loss_of(rows: Tensor, x: Tensor, padding: int) -> Tensor:
        def pad(t: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(t[rows], (0, padding), value=fill)

        return policy_loss(
            pad(x, NAN),
            pad(old, NAN),
            pad(advantages, NAN),
            pad(mask.float(), 0.0),
            aggregation=mode,
            denominator=divisor,
            rollout_ids=rollouts[rows],
        ).loss

    def update(parts: list[Tensor], padding: int) -> tuple[Tensor, Tensor]:
        x = logp.clone().requires_grad_()
        total = torch.stack([loss_of(rows, x, padding) for rows in parts]).sum()
        total.backward()
        assert x.grad is not None
        return total.detach(), x.grad

    whole = update([torch.arange(8)], 0)
    by_rollout = [(rollouts == i).nonzero()[:, 0] for i in torch.randperm(6).tolist()]
    parts = [torch.cat(by_rollout[i : i + size]) for i in range(0, 6, size)]
    for got, want in zip(update(parts, 7), whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_convention_08_masks_leave_both_parts_of_the_fraction_correction_weights_only_one() -> None:
    mask, advantages = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [4.0, 4.0]])
    old = torch.zeros(2, 2)
    assert policy_loss(old, old, advantages, mask).loss.item() == -2.5
    kept = overlong_mask(mask, torch.tensor([False, True]))
    assert policy_loss(old, old, advantages, kept).loss.item() == -1.0
    behaviour = torch.tensor([[0.0, 0.0], [-9.0, -9.0]])
    weighed = policy_loss(old, old, advantages, mask, correction="icepop", rollout_logp=behaviour)
    assert weighed.loss.item() == -0.5


def test_convention_08_weights_do_not_depend_on_the_cut(make_trainer: Make) -> None:
    """To 1e-6 with sgd, to a hundredth of the learning rate with AdamW, here from micro-batches of one row."""
    for optim, tolerance in (({"name": "sgd", "lr": 0.1}, 1e-6), ({"name": "adamw", "lr": 1e-3}, 1e-5)):
        ends = []
        for budget in (100_000, 36):
            trainer = make_trainer(optim=optim, train={"micro_batch_tokens": budget})
            with torch.no_grad():
                for parameter in trainer.policy.model.parameters():
                    parameter.div_(3.0 if parameter.ndim > 1 else 1.0)
            trainer.train(make_rows(1, 5), 0)
            ends.append(weights(trainer))
        assert distance(*ends) < tolerance


# ---------------------------------------------------------------- 9


def test_convention_09_a_batch_without_signal_is_planned_but_not_made(make_trainer: Make) -> None:
    """Its updates count for the learning rate; nothing moves, also not by momentum or weight decay."""
    optim = {"name": "adamw", "schedule": "linear", "min_lr_ratio": 0.0, "weight_decay": 0.1}
    trainer = make_trainer(optim=optim, train={"updates_per_batch": 2}, planned=8)
    trainer.train(make_rows(), 0)
    before = weights(trainer)
    for reward in (1.0, None):
        assert not trainer.train([make_row(i, 20, reward=reward) for i in range(4)], 1).updated
    assert distance(before, weights(trainer)) == 0.0
    report = trainer.train(make_rows(), 2)
    assert report.updated and report.metrics["policy/lr"] == pytest.approx(0.1 * (1 - 7 / 8))


def test_convention_09_an_entropy_term_is_signal_enough(make_trainer: Make) -> None:
    rows = [make_row(i, 20, reward=1.0) for i in range(4)]
    assert make_trainer(algo={"entropy_coef": 0.01}).train(rows, 0).updated


# ---------------------------------------------------------------- 10


def test_convention_10_the_ratio_and_its_clip() -> None:
    """exp(clamp(logp - old, -20, 20)); the clip binds on the side that gains, and there the gradient is 0."""
    for log_ratio, advantage, loss, gradient in (
        (math.log(1.1), 2.0, -2.2, -2.2),
        (math.log(1.5), 1.0, -1.2, 0.0),
        (math.log(0.5), 1.0, -0.5, -0.5),
        (math.log(0.5), -1.0, 0.8, 0.0),
        (math.log(1.5), -1.0, 1.5, 1.5),
        (500.0, -1.0, math.exp(20.0), 0.0),
        (-500.0, 1.0, -math.exp(-20.0), 0.0),
    ):
        assert single(log_ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient))


def test_convention_10_dual_clip_bounds_negative_advantages_only() -> None:
    assert single(math.log(5.0), -1.0, dual_clip=3.0) == (pytest.approx(3.0), 0.0)
    assert single(math.log(2.0), -1.0, dual_clip=3.0) == (pytest.approx(2.0), pytest.approx(2.0))
    assert single(math.log(5.0), 1.0, dual_clip=3.0) == (pytest.approx(-1.2), 0.0)


def test_convention_10_sequence_level_and_its_gradient() -> None:
    """s = exp(mean of the row), the same for every token; d s / d logp_t = s / |row|; clipped per row."""
    logp = torch.tensor([[0.1, 0.3, NAN], [0.02, 0.0, 0.04]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss, metrics = policy_loss(logp, torch.zeros(2, 3), torch.ones(2, 3), mask, level="sequence", clip=(0.1, 0.1))
    loss.backward()
    s = math.exp(0.02)
    assert loss.item() == pytest.approx(-(2 * 1.1 + 3 * s) / 5)
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, 0.0, 0.0], [-s / 5] * 3]))
    assert metrics["clip_fraction"].value == pytest.approx(2 / 5)


def test_convention_10_cispo_and_its_gradient() -> None:
    """-sg(clip(r)) A logp: no token loses its gradient; low = 1 is allowed."""
    for ratio, weight in ((3.0, 1.28), (1.1, 1.1), (0.001, 0.001)):
        loss, gradient = single(math.log(ratio), 2.0, trust="cispo", clip=(1.0, 0.28))
        assert gradient == pytest.approx(-2.0 * weight)
        assert loss == pytest.approx(-2.0 * weight * math.log(ratio))


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ({"clip": (-0.1, 0.2)}, "clip"),
        ({"clip": (0.2, -0.1)}, "clip"),
        ({"clip": (1.0, 0.2)}, "clip"),
        ({"name": "cispo", "clip": (1.1, 0.2)}, "clip"),
        ({"dual_clip": 0.9}, "dual-clip"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual-clip"),
    ],
    ids=str,
)
def test_convention_10_clips_out_of_range_are_refused_at_start_up(algo: dict[str, Any], said: str) -> None:
    refused(said, algo=algo)


# ---------------------------------------------------------------- 11


def test_convention_11_the_correction_weights() -> None:
    w = torch.tensor([[0.1, 1.0, 3.0, 8.0]])
    for kind, want in {
        "tis": [0.1, 1.0, 2.0, 2.0],
        "icepop": [0.0, 1.0, 3.0, 0.0],
        "seq_mask_tis": [0.1, 1.0, 3.0, 5.0],
        "decoupled": [0.1, 1.0, 3.0, 0.0],
    }.items():
        got = correction_weights(w.log(), torch.zeros(1, 4), torch.ones(1, 4), kind)
        torch.testing.assert_close(got, torch.tensor([want]))


def test_convention_11_sequence_level_is_the_geometric_mean() -> None:
    log_w, mask = torch.tensor([[0.5, 0.1, NAN]]), torch.tensor([[1, 1, 0]])
    for kind in ("tis", "icepop", "seq_mask_tis", "decoupled"):
        got = correction_weights(log_w, torch.zeros(1, 3), mask, kind, level="sequence")
        torch.testing.assert_close(got[0, :2], torch.full((2,), math.exp(0.3)))
    long = torch.full((1, 512), 2.0)
    assert not correction_weights(long, torch.zeros(1, 512), torch.ones(1, 512), "seq_mask_tis").any()


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq_mask_tis", "decoupled"])
def test_convention_11_the_weight_is_a_constant_to_the_gradient(kind: str) -> None:
    """w = exp(old - rollout) even where old is the current policy: the gradient is -w A / trained tokens."""
    logp = torch.tensor([[0.4, -0.3]], requires_grad=True)
    rollout, advantages = torch.zeros(1, 2), torch.tensor([[1.0, -2.0]])
    policy_loss(logp, logp, advantages, torch.ones(1, 2), rollout_logp=rollout, correction=kind).loss.backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -logp.detach().exp() * advantages / 2)


def test_convention_11_auto_is_tis_as_soon_as_tokens_may_be_stale() -> None:
    def correction(staleness: int, **algo: Any) -> str:
        return Objective.of(configured(train={"max_staleness": staleness}, algo=algo)).correction

    assert correction(0) == "none"
    assert correction(1) == correction(3) == "tis"
    assert correction(1, old_logp="rollout") == "none"
    refused("allow-uncorrected", algo={"correction": "none"}, train={"max_staleness": 1})
    refused("top-p", rollout={"top_p": 0.8})
    for algo in ({"correction": "none", "allow_uncorrected": True}, {"correction": "none", "old_logp": "rollout"}):
        config = configured(algo=algo, train={"max_staleness": 1})
        check_training(config, algorithm_facts(config))


# ---------------------------------------------------------------- 12


def test_convention_12_whose_log_probs_are_old() -> None:
    def old_logp(**sections: Any) -> str:
        return Objective.of(configured(**sections)).old_logp

    assert old_logp() == "current"
    assert old_logp(train={"updates_per_batch": 2}) == old_logp(train={"epochs": 2}) == "recompute"
    assert old_logp(algo={"old_logp": "rollout"}, train={"epochs": 2}) == "rollout"


def test_convention_12_updates_and_epochs(make_trainer: Make) -> None:
    """K updates cut the batch, epochs repeat them; with the engine's log-probs as old ones the ratio is the correction."""
    trainer = make_trainer(train={"updates_per_batch": 2, "epochs": 3})
    trainer.train(make_rows(), 0)
    assert trainer._tools.backend.engine.global_steps == 6
    metrics = make_trainer(algo={"old_logp": "rollout"}, train={"max_staleness": 1}).train(make_rows(), 0).metrics
    assert abs(metrics["policy/ratio"] - 1) > 1e-3 and "correction/mean" not in metrics


# ---------------------------------------------------------------- 13


def test_convention_13_the_estimates() -> None:
    logp, ref = torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-500.0, 0.0, -1.5])
    assert kl_estimate(logp, ref, "k1").tolist() == [20.0, -20.0, 0.5]
    assert kl_estimate(logp, ref, "k2").tolist() == [200.0, 200.0, 0.125]
    assert kl_estimate(logp, ref, "k3")[2].item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_convention_13_in_the_loss_the_gradient_is_that_of_reverse_kl() -> None:
    """Exactly, in expectation over the policy: sum_i p_i of the sampled gradients = d KL(p || ref) / d logits."""
    torch.manual_seed(0)
    logits, ref = torch.randn(6), torch.log_softmax(torch.randn(6), 0)
    x = logits.clone().requires_grad_()
    logp = torch.log_softmax(x, 0)
    (want,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), x)
    y = logits.clone().requires_grad_()
    sampled = torch.log_softmax(y, 0)[None]
    p = sampled.detach()[0].exp()
    total = sum(p[i] * kl_loss(sampled, ref[None], torch.eye(6)[i : i + 1]).loss for i in range(6))
    (got,) = torch.autograd.grad(total, y)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "gae"])
def test_convention_13_in_the_reward_it_is_summed_to_go_after_the_group_before_whitening(name: str) -> None:
    from agentrl.trainers import compute_advantages, whiten

    mask, kl = torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.tensor([[0.1, NAN, 0.2], [0.3, 0.4, 0.5]])
    rewards, options = torch.tensor([1.0, 0.0]), {"values": torch.zeros(2, 3)}
    plain = compute_advantages(name, rewards, mask, whiten=False, **options).advantages
    costs = torch.tensor([[0.15, 0.0, 0.1], [0.6, 0.45, 0.25]])
    got = compute_advantages(name, rewards, mask, kl=kl, kl_coef=0.5, whiten=False, **options).advantages
    torch.testing.assert_close(got, plain - costs)
    after = compute_advantages(name, rewards, mask, kl=kl, kl_coef=0.5, whiten=True, **options).advantages
    torch.testing.assert_close(after, whiten(plain - costs, mask))


# ---------------------------------------------------------------- 14


def test_convention_14_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert token_logprobs(logits, torch.tensor(0), 0.5).item() == pytest.approx(-0.142932, abs=1e-6)
    assert entropy(logits, 0.5).item() == pytest.approx(0.441057, abs=1e-6)
    assert entropy(logits).item() == pytest.approx(0.832396, abs=1e-6)
    assert -token_logprobs(logits, torch.tensor(0)).item() == pytest.approx(0.407606, abs=1e-6)
    refused("temperature 0", rollout={"temperature": 0.0})


def test_convention_14_the_trainer_scores_at_the_rollout_temperature(make_trainer: Make) -> None:
    metrics = {t: make_trainer(rollout={"temperature": t}).train(make_rows(), 0).metrics for t in (0.5, 2.0)}
    assert metrics[0.5]["policy/entropy"] < metrics[2.0]["policy/entropy"]
