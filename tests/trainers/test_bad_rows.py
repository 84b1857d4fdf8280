"""A number that is not finite costs the update it is in, and its rows are kept; weights stay numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers.policy_trainer import DivergenceError

from .rollouts import distance, make_row, make_rows, weights

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


@pytest.mark.parametrize("old_logp", ["rollout", "current"])
def test_nan_that_a_clamp_would_turn_into_no_gradient(make_trainer: Make, tmp_path: Path, old_logp: str) -> None:
    """A log-prob of the engine that is NaN: the ratio's clamp has gradient 0 there, and the update would be made."""
    algo = {"name": "rloo", "old_logp": old_logp, "correction": "none" if old_logp == "rollout" else "tis"}
    trainer = make_trainer(algo=algo, train={"micro_batch_tokens": 40})
    before = weights(trainer)
    rows = [make_row(i, 20, trained=1, reward=float(i % 2)) for i in range(6)]
    rows[2].logprobs[-1] = np.nan
    assert not trainer.train(rows, 1).updated
    assert distance(before, weights(trainer)) == 0.0
    assert [record["rollout_id"] for record in saved(tmp_path, 1)] == ["rollout 2"]


def test_after_too_many_the_run_stops_with_the_rows_saved(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer("untied", train={"max_bad_steps": 1, "updates_per_batch": 3})
    sicken(trainer)
    rows = make_rows()
    for row in rows:
        row.token_ids[0] = SICK
    with pytest.raises(DivergenceError, match=r"step 9, update 1.*bad_rows/.*--train\.max-bad-steps allows 1"):
        trainer.train(rows, 9)
    assert {record["what"] for record in saved(tmp_path, 9)} == {f"policy, step 9, update {i}" for i in range(2)}
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_a_critic_that_breaks_is_skipped_with_the_policy(make_trainer: Make, tmp_path: Path) -> None:
    """Its values are NaN, so are the advantages: neither makes its update, both are counted."""
    trainer = make_trainer(algo={"name": "ppo"})
    critic = {name: p.detach().clone() for name, p in trainer._critic.model.named_parameters()}
    policy = weights(trainer)
    hook = trainer._critic.model.head.register_forward_hook(lambda module, args, output: output * torch.nan)
    report = trainer.train(make_rows(), 0)
    assert not report.updated and report.metrics["policy/bad_steps"] == 2.0
    assert distance(policy, weights(trainer)) == 0.0
    assert all(torch.equal(p, critic[name]) for name, p in trainer._critic.model.named_parameters())
    assert {record["what"].split(",")[0] for record in saved(tmp_path, 0)} == {"critic", "policy"}
    hook.remove()
    assert trainer.train(make_rows(), 1).updated
