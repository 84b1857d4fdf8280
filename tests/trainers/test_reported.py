"""Faults that users of such frameworks reported, as far as they concern sums, schedules, accumulation and metrics.

Their other halves: temperature and top_p in test_conventions_08_14.py and tests/core/test_checks.py, packing in
test_scorer.py, episodes and records in tests/core and tests/report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import (
    Mean,
    aggregate,
    averages,
    dpo_loss,
    keep_group,
    merge,
    pass_at_k,
    planned_updates,
    policy_loss,
    token_logprobs,
)
from agentrl.trainers.batch import plan_updates

from ..report.builders import episode, group
from .rollouts import make_row

torch.set_num_threads(1)
NAN = math.nan
Make = Callable[..., Any]


def test_alg_12_a_group_is_judged_whole_and_by_its_score_not_its_reward() -> None:
    """A bonus for length or format hides an all-wrong group; one odd answer is what a group is kept for."""
    bonus = group(*(episode(reward, score=0.0, sample=i) for i, reward in enumerate([0.1, 0.0, 0.1, 0.0])))
    assert not keep_group(bonus.scores())
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]):
        mixed = group(*(episode(reward, sample=i) for i, reward in enumerate(rewards)))
        assert keep_group(mixed.scores()) and len(mixed.rows) == 4
    assert not keep_group([0.5, 0.5, 0.5, 0.5])


def test_tok_06_every_answer_token_is_a_term() -> None:
    """Prompt of two, answer of three with its end: the summed loss of a uniform model over 100 words is 3 ln 100."""
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    logp = token_logprobs(torch.zeros(1, 5, 100), torch.tensor([[10, 11, 20, 21, 2]]))
    assert aggregate(-logp, mask, "constant", denominator=1.0).item() == pytest.approx(13.81551, abs=1e-4)


def test_tok_08_dpo_sums_answer_tokens_only() -> None:
    """Policy minus reference by token: the prompt, however long, is in neither sum."""
    odds = {10: -0.5, 11: 0.3, 20: 0.2, 21: -0.1, 22: -0.2, 2: 0.1}

    def answer(tokens: list[int]) -> torch.Tensor:
        return torch.tensor([sum(odds[token] for token in tokens)])

    zero = torch.zeros(1)
    loss = dpo_loss(answer([20, 2]), answer([21, 22, 2]), zero, zero, beta=0.5).loss
    assert loss.item() == pytest.approx(0.575939, abs=1e-6)
    wrong = dpo_loss(answer([20, 2]), answer([10, 11, 21, 22, 2]), zero, zero, beta=0.5).loss
    assert wrong.item() == pytest.approx(0.533382, abs=1e-6)


def test_ckp_02_the_horizon_counts_optimizer_updates() -> None:
    counts = {"prompts": 16, "n": 4, "train_batch": 16, "epochs": 2, "rollouts": 5, "episodes": 3}
    assert planned_updates(**counts) == 120


def test_ckp_02_the_rate_ends_at_its_minimum_whatever_the_number_of_rows(make_trainer: Make) -> None:
    """Rollouts of 1 to 5 rows, micro-batches of one or two rows: one step of the schedule an update, none besides."""
    steps = 24
    trainer = make_trainer(train={"micro_batch_tokens": 30}, planned=steps)
    rates = []
    for step in range(steps):
        rows = [
            make_row(100 * step + 10 * i + part, 14, rollout=f"{i}", reward=float(i % 2))
            for i in range(2)
            for part in range(1 + (step + 3 * i) % 5)
        ]
        rates.append(trainer.train(rows, step).metrics["policy/lr"])
    assert rates == pytest.approx([0.1 * (1 - step / steps) for step in range(steps)])
    assert rates[-1] < 0.05 * rates[0]


def test_cli_03_padding_rows_weigh_nothing() -> None:
    """Five rows on two ranks: the sixth place repeats the first without weight, in the loss and in the metrics."""
    losses = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [1.0]])
    real = torch.tensor([[1], [1], [1], [1], [1], [0]])
    assert aggregate(losses, real).item() == 3.0
    by_rank = [aggregate(losses[rank::2], real[rank::2], denominator=5.0) for rank in (0, 1)]
    assert sum(by_rank).item() == pytest.approx(3.0)
    (update,) = plan_updates(range(5), [10] * 5, [True] * 5, ranks=2, budget=10)
    batches = [step[rank] for step in update.steps for rank in (0, 1)]
    assert sorted(batches) == [(), (0,), (1,), (2,), (3,), (4,)]


def test_log_01_a_mean_of_means_is_none() -> None:
    """KL .2 over 6 tokens and .8 over 2 is .35, in however many parts the tokens come."""
    values = torch.tensor([0.2] * 6 + [0.8] * 2)
    for size in (1, 2, 3, 8):
        parts = [{"kl": Mean(float(part.sum()), len(part))} for part in values.split(size)]
        assert averages(merge(parts))["kl"] == pytest.approx(0.35)


def test_log_01_what_is_missing_is_left_out() -> None:
    rewards = [{"reward": Mean(1.0, 1)}, {}, {"reward": Mean(0.0, 1)}]
    assert merge(rewards)["reward"].count == 2 and averages(merge(rewards)) == {"reward": 0.5}


def test_log_03_pass_at_k_is_unbiased_and_by_prompt() -> None:
    assert [pass_at_k(6, 2, k) for k in (1, 3, 6)] == pytest.approx([1 / 3, 0.8, 1.0])
    assert (pass_at_k(6, 2, 3) + pass_at_k(6, 0, 3)) / 2 == pytest.approx(0.4)


@pytest.mark.parametrize("observed", [3, 300])
def test_masked_tool_text_is_in_no_metric(observed: int) -> None:
    sampled = torch.tensor([[-1.0, -2.0, -0.5]])

    def around(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([values[:, :1], torch.full((1, observed), fill), values[:, 1:]], dim=1)

    mask = around(torch.ones(1, 3), 0.0)
    tensors = [around(x, NAN) for x in (sampled, sampled - 0.1, torch.ones(1, 3))]
    got = policy_loss(*tensors, mask, rollout_logp=around(sampled + 0.2, NAN), correction="tis")
    want = policy_loss(
        sampled, sampled - 0.1, torch.ones(1, 3), torch.ones(1, 3), rollout_logp=sampled + 0.2, correction="tis"
    )
    assert got.metrics == want.metrics and torch.equal(got.loss, want.loss)


def test_the_divisor_of_dr_grpo_is_no_padded_width(make_trainer: Make) -> None:
    """The same rollouts beside one very long, unjudged row: same loss, as rollouts x the longest possible divides."""
    rows = [make_row(i, 20, reward=float(i % 2)) for i in range(4)]
    options: dict[str, Any] = {"algo": {"name": "dr_grpo", "old_logp": "rollout"}, "rollout": {"max_total_tokens": 50}}
    alone = make_trainer(**options).train(rows, 0).metrics["policy/loss"]
    unjudged = make_row(9, 200, trained=150, reward=None)
    beside = make_trainer(**options).train([*rows, unjudged], 0).metrics["policy/loss"]
    assert alone == pytest.approx(beside, abs=1e-7)
    assert alone != 0.0


def test_a_sequence_ratio_does_not_explode_with_length() -> None:
    for log_ratio, weight, zeroed in ((0.02, 1.020201, 0.0), (2.0, 0.0, 1.0)):
        old = torch.full((1, 512), log_ratio)
        given = old, old, torch.ones(1, 512), torch.ones(1, 512)
        options = {"correction": "seq_mask_tis", "correction_level": "sequence"}
        metrics = averages(policy_loss(*given, rollout_logp=torch.zeros(1, 512), **options).metrics)
        assert metrics["correction_mean"] == pytest.approx(weight, abs=1e-5)
        assert metrics["correction_zeroed"] == zeroed


@pytest.mark.parametrize(("off", "warned"), [(8.0, True), (0.0, False)])
def test_a_correction_that_leaves_little_to_train_is_said(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, off: float, warned: bool
) -> None:
    trainer = make_trainer(algo={"correction": "icepop", "correction_range": (0.0, 1e6)})
    rows = [make_row(i, 20, reward=float(i % 2)) for i in range(4)]
    for row in rows:
        row.logprobs -= np.where(row.loss_mask, 2 * off, 0.0).astype(np.float32)
    metrics = trainer.train(rows, 0).metrics
    assert metrics["correction/zeroed"] == float(warned)
    assert ("100 % of the trained tokens weight 0" in caplog.text) == warned


def test_every_turn_of_a_merged_row_is_trained(make_trainer: Make) -> None:
    """Three turns of 8 tokens with observations between them: 24 tokens get an advantage, whatever a turn may hold."""
    row = make_row(0, 40, trained=1, reward=1.0)
    row.loss_mask[:] = False
    for start in (4, 16, 28):
        row.loss_mask[start : start + 8] = True
    row.logprobs[:] = np.where(row.loss_mask, -5.5, 0.0)
    report = make_trainer(rollout={"max_new_tokens": 8}).train([row, make_row(1, 20, reward=0.0)], 0)
    assert np.count_nonzero(report.advantages[0]) == 24
