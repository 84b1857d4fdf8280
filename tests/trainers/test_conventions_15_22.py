"""Conventions 15 to 22: value function, credit, shaping, filter, supervised and preference losses, metrics, accumulation.

What the rollouts do by convention 18 (groups dropped whole, refilled) is in tests/core/test_filter.py, what they do by
convention 19 (which tokens are trained) in tests/core/test_stop_tokens.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import (
    Mean,
    averages,
    clip_rewards,
    compute_advantages,
    dpo_loss,
    keep_group,
    merge,
    overlong_mask,
    overlong_penalty,
    policy_loss,
    reward_model_loss,
    stop_properly,
    value_loss,
)
from agentrl.trainers.batch import plan_updates
from torch import Tensor

from agentrl import Row, Task
from agentrl.engine import Generation, Span
from agentrl.trajectory import Trajectory

from .rollouts import make_row, make_rows, weights

torch.set_num_threads(1)
NAN = math.nan
STOP = 2
"""Stands for the token that ends a turn."""
Make = Callable[..., Any]


def assert_close(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float32), atol=1e-6, rtol=1e-5)


def test_convention_15_gae_runs_over_the_trained_tokens() -> None:
    """delta_t = r_t + gamma V_{t+1} - V_t, V after the last token is `bootstrap`; A_t = delta_t + gamma lam A_{t+1}."""
    mask = torch.tensor([[1, 0, 0, 1, 1]])
    values = torch.tensor([[0.5, NAN, 7.0, 0.25, -0.5]])
    got = compute_advantages(
        "gae",
        torch.tensor([1.0]),
        mask,
        values=values,
        bootstrap=torch.tensor([2.0]),
        gamma=0.9,
        lam=0.8,
        whiten=False,
    )
    deltas = [0.9 * 0.25 - 0.5, 0.9 * -0.5 - 0.25, 1.0 + 0.9 * 2.0 + 0.5]
    last = deltas[2]
    middle = deltas[1] + 0.72 * last
    first = deltas[0] + 0.72 * middle
    assert_close(got.advantages, [[first, 0, 0, middle, last]])
    assert_close(got.returns, [[first + 0.5, 0, 0, middle + 0.25, last - 0.5]])


def test_convention_15_no_bootstrap_means_the_episode_ended() -> None:
    given = torch.tensor([1.0]), torch.ones(1, 2)
    options = {"values": torch.rand(1, 2), "whiten": False}
    absent = compute_advantages("gae", *given, **options)
    zero = compute_advantages("gae", *given, bootstrap=torch.zeros(1), **options)
    assert torch.equal(absent.advantages, zero.advantages)


def test_convention_15_the_value_loss_and_its_gradient() -> None:
    """0.5 * mean(max(unclipped, clipped)); where the clipped term is larger and the clip binds, no gradient."""
    values = torch.tensor([[0.1, 0.5, 1.5, NAN]], requires_grad=True)
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, 1.0, NAN]])
    mask = torch.tensor([[1, 1, 1, 0]])
    loss = value_loss(values, old, returns, mask, clip=0.2).loss
    loss.backward()
    assert_close(loss, 0.5 * (0.9**2 + 0.8**2 + 0.8**2) / 3)
    assert values.grad is not None
    assert_close(values.grad, [[-0.9 / 3, 0.0, 0.0, 0.0]])
    values.grad = None
    value_loss(values, None, returns, mask).loss.backward()
    assert_close(values.grad, [[-0.9 / 3, -0.5 / 3, 0.5 / 3, 0.0]])


def test_convention_16_credit_by_turn() -> None:
    """Turn rewards stand on their own tokens; the baseline subtracts mean(group sum) at the last trained token."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0]])
    turns = torch.tensor([[0.0, 1.0, NAN, 2.0], [0.5, NAN, 0.5, NAN]])
    options = {"token_rewards": turns, "whiten": False}
    plain = compute_advantages("reinforce", torch.zeros(2), mask, gamma=0.5, **options)
    assert_close(plain.advantages, [[1.0, 2.0, 0.0, 2.0], [0.75, 0.0, 0.5, 0.0]])
    based = compute_advantages("reinforce_baseline", torch.zeros(2), mask, **options)
    assert_close(based.advantages, [[1.0, 1.0, 0.0, 0.0], [-1.0, 0.0, -1.5, 0.0]])
    delta = compute_advantages("gae", torch.zeros(2), mask, values=torch.zeros(2, 4), gamma=0.5, **options)
    assert_close(delta.advantages, plain.advantages)
    for name in ("rloo", "grpo", "dr_grpo"):
        with pytest.raises(ValueError, match="takes rewards, not token_rewards"):
            compute_advantages(name, torch.zeros(2), mask, **options)


def test_convention_17_the_order_of_shaping() -> None:
    """Filter on the raw score, clip of the raw reward, overlong penalty, stop-properly; no verdict stays none."""
    raw = torch.tensor([9.0, 0.5, 0.5, NAN])
    lengths, truncated = torch.tensor([95, 80, 100, 100]), torch.tensor([False, False, True, True])
    assert keep_group(raw)
    clipped = clip_rewards(raw, -1.0, 1.0)
    penalised = overlong_penalty(clipped, lengths, max_new=100, buffer=20, factor=2.0)
    assert_close(penalised[:3], [1.0 - 2.0 * 15 / 20, 0.5, 0.5 - 2.0])
    assert_close(stop_properly(penalised, truncated, 0.5)[:3], [-0.5, 0.5, -0.75])
    assert_close(stop_properly(penalised, truncated, -4.0)[:3], [-0.5, 0.5, -4.0])
    assert stop_properly(penalised, truncated, -4.0)[3].isnan()


def test_convention_17_the_overlong_mask_acts_on_the_loss_only() -> None:
    """A truncated rollout stays in the baseline of the others, and leaves the loss's denominator."""
    rewards, mask, truncated = torch.tensor([1.0, 0.0]), torch.ones(2, 2), torch.tensor([False, True])
    advantages = compute_advantages("dr_grpo", rewards, mask).advantages
    assert_close(advantages, [[0.5, 0.5], [-0.5, -0.5]])
    loss = policy_loss(mask, mask, advantages, overlong_mask(mask, truncated)).loss
    assert_close(loss, -0.5)


def test_convention_17_the_penalty_counts_the_tokens_of_a_whole_rollout(make_trainer: Make) -> None:
    """L = trained tokens over all rows; the longest is rollout.max_total_tokens, its buffer a fifth of that."""
    rows = [
        make_row(0, 20, trained=10, rollout="long", reward=1.0),
        make_row(1, 20, trained=8, rollout="long", reward=1.0),
        make_row(2, 20, trained=16, rollout="short", reward=1.0),
    ]
    report = make_trainer(algo={"name": "dapo"}, rollout={"max_total_tokens": 20}).train(rows, 0)
    last = [advantages[-1] for advantages in report.advantages]
    assert last[0] == last[1] < 0 < last[2]


def test_convention_18_a_group_is_kept_for_the_spread_of_its_raw_scores() -> None:
    assert keep_group([0.1, 0.1 + 1e-7]) and not keep_group([0.1] * 7)
    assert keep_group([1, None, NAN, 0]) and not keep_group([1, None, NAN])
    assert not keep_group([1, 0], low=0.5) and not keep_group([1, 0], high=0.5)
    assert keep_group([1, 0], low=0.4, high=0.6)


def test_convention_19_a_sampled_stop_token_is_trained_and_an_appended_one_is_not(make_trainer: Make) -> None:
    """From the episode to the gradient: a turn that was stopped, one that was cut and closed by the framework, a last one
    that was cut. One sgd step moves the weights by what exactly the sampled ids weigh.
    """
    rows = [episode(f"r{i}", [60 + i, 61, STOP], [70, 71 + i], [80, 81 + i], reward=float(i)) for i in range(2)]
    for i, row in enumerate(rows):
        assert row.token_ids[row.loss_mask].tolist() == [60 + i, 61, STOP, 70, 71 + i, 80, 81 + i]
        appended = int(np.flatnonzero(row.token_ids == STOP)[1])
        assert row.token_ids[appended - 1] == 71 + i and not row.loss_mask[appended] and row.truncated
    trainer, model = make_trainer("untied"), make_trainer("untied").policy.model
    before = weights(trainer)
    report = trainer.train(rows, 0)
    loss = torch.zeros(())
    for row, advantages in zip(rows, report.advantages, strict=True):
        assert ((advantages != 0) == row.loss_mask).all()
        ids = torch.from_numpy(row.token_ids).long()
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(row.loss_mask):
            loss = loss - float(advantages[place]) * logp[place - 1, ids[place]] / 14
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(before[name] - weights(trainer)[name], 0.1 * parameter.grad, atol=1e-6, rtol=1e-3)


def episode(rollout: str, *turns: list[int], reward: float) -> Row:
    """The row of turns with a question before each. What was sampled without STOP at its end is closed with one, but for
    the last turn, after which nothing follows.
    """
    trajectory, said = Trajectory(Task("t"), rollout, "g"), None
    for ids in turns:
        closed = said is None or said.token_ids[-1] == STOP
        said = trajectory.add(said, "user", [*([] if closed else [STOP]), 10, 11])
        stopped = "stop" if ids[-1] == STOP else "length"
        said = trajectory.add_sampled(
            said, Generation(tuple(ids), (-5.5,) * len(ids), (Span(0, 0, len(ids)),), stopped)
        )
    said.reward, trajectory.truncated = reward, True
    (row,) = trajectory.rows()
    return row


def test_convention_20_preference_losses() -> None:
    """-logsigmoid(beta h) on summed log-probs, its smoothing and IPO; -logsigmoid(r_c - r_r - margin); means over pairs."""
    pairs = [torch.tensor(x) for x in ([-3.0, -8.0], [-4.0, -5.0], [-3.5, -7.0], [-3.5, -6.0])]
    h = [(-3.0 + 4.0) - (-3.5 + 3.5), (-8.0 + 5.0) - (-7.0 + 6.0)]

    def softplus(x: float) -> float:
        return math.log1p(math.exp(x))

    assert_close(dpo_loss(*pairs, beta=0.5).loss, sum(softplus(-0.5 * x) for x in h) / 2)
    smooth = sum(0.9 * softplus(-0.5 * x) + 0.1 * softplus(0.5 * x) for x in h) / 2
    assert_close(dpo_loss(*pairs, beta=0.5, label_smoothing=0.1).loss, smooth)
    assert_close(dpo_loss(*pairs, beta=0.5, kind="ipo").loss, sum((x - 1.0) ** 2 for x in h) / 2)
    scores = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert_close(reward_model_loss(*scores).loss, (softplus(-1.0) + softplus(2.0)) / 2)
    assert_close(reward_model_loss(*scores, margin=torch.tensor([0.5, 0.0])).loss, (softplus(-0.5) + softplus(2.0)) / 2)


def test_convention_21_sums_and_counts_are_merged_then_divided() -> None:
    parts = [{"kl": Mean(6 * 0.2, 6)}, {"kl": Mean(2 * 0.8, 2)}, {}, {"never": Mean(0.0, 0)}]
    assert averages(merge(parts)) == {"kl": pytest.approx(0.35)}


def test_convention_21_metrics_of_a_batch_do_not_depend_on_the_cut(make_trainer: Make) -> None:
    rows = make_rows()
    one, many = (make_trainer(train={"micro_batch_tokens": budget}).train(rows, 0).metrics for budget in (100_000, 36))
    assert one == pytest.approx(many, abs=1e-5, rel=1e-5)


def test_convention_22_ranks_agree_on_the_number_of_steps_and_every_row_is_in_one() -> None:
    """3, 5 and 1 rollouts on two ranks: as many micro-steps on each, where one may have nothing to do."""
    for count in (3, 5, 1):
        rollouts = list(range(count))
        (update,) = plan_updates(rollouts, [30] * count, [True] * count, ranks=2, budget=40)
        assert all(len(step) == 2 for step in update.steps)
        assert sorted(row for step in update.steps for batch in step for row in batch) == rollouts


def test_convention_22_one_step_for_each_planned_update(make_trainer: Make) -> None:
    trainer = make_trainer(train={"micro_batch_tokens": 40})
    for step, count in enumerate((3, 5, 1)):
        rows = [make_row(10 * step + i, 30, rollout=f"{i}", reward=float(i % 2)) for i in range(2 * count)]
        trainer.train(rows, step)
        assert all(parameter.grad is None for parameter in trainer.policy.model.parameters())
    assert trainer._tools.backend.engine.global_steps == 3


def test_every_convention_has_a_named_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_conventions_*.py"))
    assert {int(number) for number in re.findall(r"def test_convention_(\d\d)_", text)} == set(range(1, 23))
