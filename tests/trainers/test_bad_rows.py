"""A number that is not finite costs its rollout, or the update it is in, and its rows are kept; weights and metrics stay
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers.policy_trainer import DivergenceError

from .rollouts import distance, make_rows, weights

Make = Callable[..., Any]
SICK = 300
"""An id that no row holds unless it is put there."""


def saved(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "bad_rows" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def sicken(trainer: Any) -> None:
    """The policy makes NaN of every sequence with the id SICK in it."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == SICK)[..., None], torch.nan, output)

    trainer.policy.model.get_input_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize("stage", [0, 2])
def test_nan_at_a_trained_token_skips_the_update_and_names_the_rows(
    make_trainer: Make, tmp_path: Path, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("untied", parallel={"zero_stage": stage}, train={"micro_batch_tokens": 60})
    sicken(trainer)
    before = weights(trainer)
    rows = make_rows()
    rows[4].token_ids[0] = SICK
    report = trainer.train(rows, 4)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    assert "policy/loss" not in report.metrics
    assert distance(before, weights(trainer)) == 0.0
    (record,) = saved(tmp_path, 4)
    assert record["rollout_id"] == rows[4].rollout_id
    assert record["token_ids"] == rows[4].token_ids.tolist()
    assert record["what"] == "policy, step 4, update 0"
    assert rows[4].rollout_id in caplog.text
    assert trainer.train(make_rows(), 5).updated
    assert distance(before, weights(trainer)) > 0.0


def test_nan_that_is_not_trained_costs_nothing(make_trainer: Make) -> None:
    """In a row without verdict: the row is never read."""
    trainer = make_trainer("untied")
    sicken(trainer)
    rows = make_rows()
    unread = next(row for row in rows if row.total_reward is None)
    unread.token_ids[0] = SICK
    assert trainer.train(rows, 0).updated


def test_a_reward_that_float32_cannot_hold_is_no_verdict(make_trainer: Make, tmp_path: Path) -> None:
    """The others train as without it."""
    trainer, other = make_trainer(algo={"name": "rloo"}), make_trainer(algo={"name": "rloo"})
    rows = make_rows(2)
    for row in rows:
        if row.rollout_id == "r3":
            row.total_reward = 1e39
    report = trainer.train(rows, 1)
    left = other.train([row for row in rows if row.rollout_id != "r3"], 1)
    assert report.updated and distance(weights(trainer), weights(other)) < 1e-6
    assert report.metrics["mismatch/kl"] == pytest.approx(left.metrics["mismatch/kl"], abs=1e-6)
    names = ("rollouts/not_finite", "rollouts/unused", "policy/bad_steps")
    assert [report.metrics[name] for name in names] == [1.0, 1.0 + left.metrics["rollouts/unused"], 0.0]
    assert {record["rollout_id"] for record in saved(tmp_path, 1)} == {"r3"}


@pytest.mark.parametrize(("old_logp", "value"), [("rollout", np.nan), ("current", -np.inf)])
def test_a_log_prob_of_the_engine_that_is_not_finite_costs_the_step(
    make_trainer: Make, tmp_path: Path, old_logp: str, value: float
) -> None:
    trainer = make_trainer(algo={"name": "rloo", "old_logp": old_logp})
    before, rows = weights(trainer), make_rows(2)
    hurt = next(row for row in rows if row.rollout_id == "r3")
    hurt.logprobs[np.flatnonzero(hurt.loss_mask)[-1]] = value
    report = trainer.train(rows, 1)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    assert distance(before, weights(trainer)) == 0.0
    assert all(np.isfinite(number) for number in report.metrics.values())
    assert {record["rollout_id"] for record in saved(tmp_path, 1)} == {"r3"}


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "ppo"])
def test_a_nan_of_the_reference_costs_one_step_however_many_updates_it_has(make_trainer: Make, algorithm: str) -> None:
    sections = {"algo": {"name": algorithm, "kl": {"coef": 0.1}}, "train": {"updates_per_batch": 4, "max_bad_steps": 1}}
    trainer = make_trainer(**sections)
    ask = trainer._judges.reference.log_probs
    trainer._judges.reference.log_probs = lambda rows: [
        found * (torch.nan if row.rollout_id == "r3" else 1.0) for row, found in zip(rows, ask(rows), strict=True)
    ]
    before = weights(trainer)
    report = trainer.train(make_rows(), 0)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    assert distance(before, weights(trainer)) == 0.0
    with pytest.raises(DivergenceError, match=r"--train\.max-bad-steps allows 1"):
        trainer.train(make_rows(), 1)


def test_a_step_is_bad_once_however_many_updates_it_loses(make_trainer: Make) -> None:
    """`max_bad_steps` counts batches taken; the metrics of updates that were not made are not written."""
    trainer = make_trainer("untied", algo={"old_logp": "current"}, train={"updates_per_batch": 6, "max_bad_steps": 1})
    sicken(trainer)
    rows = make_rows()
    for row in rows:
        row.token_ids[0] = SICK
    report = trainer.train(rows, 0)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    assert all(np.isfinite(number) for number in report.metrics.values())
    assert not any(name.startswith("mismatch/") for name in report.metrics)
    with pytest.raises(DivergenceError, match=r"step 1, update 6.*--train\.max-bad-steps allows 1"):
        trainer.train(rows, 1)


def test_after_too_many_the_run_stops_with_the_rows_saved(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer("untied", train={"max_bad_steps": 1, "updates_per_batch": 3})
    sicken(trainer)
    rows = make_rows()
    for row in rows:
        row.token_ids[0] = SICK
    trainer.train(rows, 8)
    with pytest.raises(DivergenceError, match=r"step 9: .*bad_rows/.*--train\.max-bad-steps allows 1"):
        trainer.train(rows, 9)
    assert {record["what"] for record in saved(tmp_path, 9)} == {"step 9"}
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_a_critic_that_breaks_is_skipped_with_the_policy(make_trainer: Make, tmp_path: Path) -> None:
    """Its values are NaN, so would the advantages be: no rollout is left, and neither makes its update."""
    trainer = make_trainer(algo={"name": "ppo"})
    critic = {name: p.detach().clone() for name, p in trainer._critic.model.named_parameters()}
    policy = weights(trainer)
    hook = trainer._critic.model.head.register_forward_hook(lambda module, args, output: output * torch.nan)
    report = trainer.train(make_rows(), 0)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    assert distance(policy, weights(trainer)) == 0.0
    assert all(torch.equal(p, critic[name]) for name, p in trainer._critic.model.named_parameters())
    assert {record["rollout_id"] for record in saved(tmp_path, 0)} == {
        row.rollout_id for row in make_rows() if row.total_reward is not None
    }
    hook.remove()
    assert trainer.train(make_rows(), 1).updated
