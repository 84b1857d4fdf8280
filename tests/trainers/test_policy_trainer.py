from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers.policy_trainer import DivergenceError

from agentrl import Image, Row
from agentrl.image_store import ImageStore

from .rollouts import distance, make_row, make_rows, published, weights

Make = Callable[..., Any]
CUTS = (100_000, 90, 40)
"""Micro-batch budgets that cut `make_rows()` into one, several and many micro-batches."""


def trained(trainer: Any, batches: list[list[Row]]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return [trainer.train(rows, step).metrics for step, rows in enumerate(batches)], weights(trainer)


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "grpo", "dr_grpo", "gspo", "cispo", "dapo"])
def test_metrics_and_weights_do_not_depend_on_the_cut(make_trainer: Make, algorithm: str) -> None:
    batches = [make_rows(), make_rows(2, 5)]
    algo = {"name": algorithm, "entropy_coef": 0.01, "old_logp": "rollout"}
    runs = [trained(make_trainer(algo=algo, train={"micro_batch_tokens": budget}), batches) for budget in CUTS]
    for metrics, result in runs[1:]:
        assert distance(result, runs[0][1]) < 1e-6
        for one, other in zip(metrics, runs[0][0], strict=True):
            assert one["policy/loss"] == pytest.approx(other["policy/loss"], abs=1e-6)
            assert one == pytest.approx(other, abs=1e-5, rel=1e-5)


def test_adamw_agrees_within_a_hundredth_of_the_learning_rate(make_trainer: Make) -> None:
    """Its first step is the gradient's sign where that is well above 1e-8, hence a model of ordinary size of weights."""
    runs = []
    for budget in CUTS:
        trainer = make_trainer(optim={"name": "adamw", "lr": 1e-3}, train={"micro_batch_tokens": budget})
        with torch.no_grad():
            for parameter in trainer.policy.model.parameters():
                parameter.div_(3.0 if parameter.ndim > 1 else 1.0)
        runs.append(trained(trainer, [make_rows(1, 5)])[1])
    assert max(distance(run, runs[0]) for run in runs) < 1e-5


def test_the_order_of_rollouts_does_not_matter(make_trainer: Make) -> None:
    rows = make_rows()
    order = sorted({row.rollout_id for row in rows})
    random.Random(1).shuffle(order)
    shuffled = [row for rollout in order for row in rows if row.rollout_id == rollout]
    (one,), first = trained(make_trainer(), [rows])
    (other,), second = trained(make_trainer(), [shuffled])
    assert one == pytest.approx(other, abs=1e-5)
    assert distance(first, second) < 1e-6


def test_a_row_without_verdict_changes_nothing(make_trainer: Make) -> None:
    rows = make_rows()
    used = [row for row in rows if row.total_reward is not None]
    assert len(used) < len(rows)
    _, with_it = trained(make_trainer(), [rows])
    _, without = trained(make_trainer(), [used])
    assert distance(with_it, without) < 1e-6


def test_recomputed_activations_change_nothing(make_trainer: Make) -> None:
    plain, recomputing = (make_trainer(train={"gradient_checkpointing": on}) for on in (False, True))
    runs: list[Any] = []
    for trainer in (plain, recomputing):
        trainer.policy.trunk.layers[0].mlp.register_forward_pre_hook(lambda layer, *_: runs.append(layer))
    _, expected = trained(plain, [make_rows()])
    _, result = trained(recomputing, [make_rows()])
    assert distance(expected, result) < 1e-7
    assert len(runs) == 3


def test_the_first_gradient_is_the_score_function(make_trainer: Make) -> None:
    """One sgd step moves the weights by -lr times the gradient of -sum(A logp) / trained tokens."""
    rows = make_rows()
    trainer = make_trainer(rollout={"temperature": 0.7})
    before = weights(trainer)
    report = trainer.train(rows, 0)
    model = make_trainer().policy.model
    total = torch.zeros(())
    for row, advantages in zip(rows, report.advantages, strict=True):
        ids = torch.from_numpy(row.token_ids).long()
        logp = (model(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total - (logp * torch.from_numpy(advantages)[1:]).sum()
    count = sum(int(row.loss_mask.sum()) for row in rows if row.total_reward is not None)
    (total / count).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights(trainer)[name], before[name] - 0.1 * parameter.grad, atol=1e-6)


def test_report_of_a_batch(make_trainer: Make) -> None:
    rows = make_rows()
    report = make_trainer().train(rows, 0)
    assert report.updated
    for row, advantages in zip(rows, report.advantages, strict=True):
        assert advantages.dtype == np.float32 and advantages.shape == row.token_ids.shape
        assert not advantages[~row.loss_mask].any()
        assert advantages.any() == (row.total_reward is not None)
    wanted = {"loss", "kl_old", "clip_fraction", "entropy", "grad_norm", "lr"}
    assert {f"policy/{name}" for name in wanted} <= report.metrics.keys()
    assert report.metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-5)
    assert report.metrics["advantage/std"] == pytest.approx(1.0, abs=1e-5)
    assert report.metrics["policy/grad_norm"] > 0
    assert report.metrics["rollouts/unused"] == 1.0


def test_mismatch_is_taken_at_tokens_of_the_version_being_trained(make_trainer: Make) -> None:
    trainer = make_trainer()
    rows = make_rows()
    exact = trainer.train(rows, 0).metrics
    trainer.publish(4)
    trainer.release()
    assert "mismatch/kl" in exact
    stale = trainer.train(rows, 1).metrics
    assert "mismatch/kl" not in stale and "mismatch/max_abs" not in stale
    for row in rows[::2]:
        row.versions[row.loss_mask] = 4
    assert trainer.train(rows, 2).metrics["mismatch/max_abs"] > 0


@pytest.mark.parametrize("old_logp", ["current", "recompute"])
def test_log_probs_of_the_engine_that_are_right_show_no_mismatch(make_trainer: Make, old_logp: str) -> None:
    rows = make_rows()
    model = make_trainer().policy.model
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()
        with torch.no_grad():
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
        row.logprobs[1:] = np.where(row.loss_mask[1:], logp, 0.0)
    metrics = make_trainer(algo={"old_logp": old_logp}).train(rows, 0).metrics
    assert metrics["mismatch/max_abs"] < 1e-5
    assert metrics["mismatch/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/kl_old"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("reward", [1.0, None])
def test_a_batch_without_signal_moves_nothing_but_the_schedule(make_trainer: Make, reward: float | None) -> None:
    trainer = make_trainer(optim={"schedule": "linear", "min_lr_ratio": 0.0}, planned=10)
    before = weights(trainer)
    report = trainer.train([make_row(i, 20, reward=reward) for i in range(4)], 0)
    assert not report.updated
    assert distance(before, weights(trainer)) == 0.0
    assert trainer.train(make_rows(), 1).metrics["policy/lr"] == pytest.approx(0.1 * 0.9)


def test_groups_left_with_one_member_are_counted(make_trainer: Make) -> None:
    rows = [make_row(i, 20, group=f"g{i // 2}", reward=[1.0, 0.0, 1.0, None][i]) for i in range(4)]
    report = make_trainer(algo={"name": "grpo"}).train(rows, 0)
    assert report.metrics["groups/shrunk"] == 1.0
    assert report.metrics["rollouts/unused"] == 2.0
    assert not report.advantages[2].any() and not report.advantages[3].any()


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "grpo"])
def test_a_batch_in_which_nothing_was_sampled_makes_no_update(make_trainer: Make, algorithm: str) -> None:
    trainer = make_trainer(algo={"name": algorithm})
    report = trainer.train([], 0)
    assert not report.updated and report.advantages == []
    assert trainer.train(make_rows(), 1).updated


def poison(trainer: Any) -> None:
    """Make the next gradient NaN, once."""
    parameter = next(trainer.policy.model.parameters())
    handle = parameter.register_hook(lambda grad: (handle.remove(), grad * float("nan"))[1])


@pytest.mark.parametrize(
    ("stage", "dtype", "offload"),
    [
        *((stage, "float32", False) for stage in range(4)),
        *((stage, "bfloat16", True) for stage in (1, 2, 3)),
    ],
)
def test_a_non_finite_gradient_costs_its_update(make_trainer: Make, stage: int, dtype: str, offload: bool) -> None:
    parallel = {"zero_stage": stage, "offload_optimizer": offload}
    trainer = make_trainer(parallel=parallel, model={"dtype": dtype}, train={"max_bad_steps": 1})
    before = weights(trainer) if stage < 3 else {}
    poison(trainer)
    report = trainer.train(make_rows(), 0)
    assert not report.updated
    assert report.metrics["policy/bad_steps"] == 1.0
    assert stage == 3 or distance(before, weights(trainer)) == 0.0
    good = trainer.train(make_rows(), 1)
    assert good.updated and np.isfinite(good.metrics["policy/grad_norm"])
    poison(trainer)
    with pytest.raises(DivergenceError, match=r"step 2, update 2.*--train\.max-bad-steps allows 1"):
        trainer.train(make_rows(), 2)


def test_gradients_are_clipped_to_the_norm(make_trainer: Make) -> None:
    free, clipped = make_trainer(), make_trainer(optim={"max_norm": 0.01})
    before = weights(free)
    norm = free.train(make_rows(), 0).metrics["policy/grad_norm"]
    assert clipped.train(make_rows(), 0).metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    after = weights(clipped)
    moved = torch.sqrt(sum(((after[name] - before[name]) ** 2).sum() for name in before))
    assert float(moved) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_several_updates_use_the_log_probs_of_the_start(make_trainer: Make) -> None:
    trainer = make_trainer(optim={"lr": 2.0}, train={"updates_per_batch": 2, "epochs": 2})
    report = trainer.train(make_rows(), 0)
    assert trainer._tools.backend.engine.global_steps == 4
    assert report.metrics["policy/kl_old"] > 0
    assert report.metrics["policy/ratio"] != pytest.approx(1.0, abs=1e-6)


def test_updates_with_current_log_probs_never_leave_the_trust_region(make_trainer: Make) -> None:
    trainer = make_trainer(optim={"lr": 2.0}, algo={"old_logp": "current"}, train={"epochs": 2})
    assert trainer.train(make_rows(), 0).metrics["policy/kl_old"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("correction", ["auto", "tis", "icepop", "seq_mask_tis", "decoupled"])
def test_asynchronous_batches_are_corrected(make_trainer: Make, correction: str) -> None:
    trainer = make_trainer(algo={"correction": correction}, train={"max_staleness": 1})
    metrics = trainer.train(make_rows(), 0).metrics
    assert {"correction/mean", "correction/zeroed"} <= metrics.keys()
    assert "correction/mean" not in make_trainer().train(make_rows(), 0).metrics


def test_the_overlong_penalty_of_dapo_lowers_long_rollouts(make_trainer: Make) -> None:
    rows = [make_row(i, 30, trained=20 if i else 4, reward=1.0) for i in range(4)]
    report = make_trainer(algo={"name": "dapo"}, rollout={"max_total_tokens": 20}).train(rows, 0)
    first, second = report.advantages[0], report.advantages[1]
    assert first[-4:].min() > 0 > second[-20:].max()


def test_rows_with_pictures_train_a_vision_model(make_trainer: Make, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    runs = []
    for budget in CUTS[:2]:
        trainer = make_trainer("vision", train={"micro_batch_tokens": budget})
        rows = []
        for i in range(6):
            pixels = np.random.default_rng(i).integers(0, 255, (56, 56 + 14 * (i % 3), 3)).astype(np.uint8)
            sha = store.put(Image(_picture(pixels)))
            count = 4 * (4 + i % 3)
            slot = (sha, 3, count)
            rows.append(
                make_row(i, 40, trained=8, images=(slot,), placeholder=trainer.policy.image_id, reward=float(i % 2))
            )
        rows.append(make_row(9, 15, reward=0.0))
        before = weights(trainer)
        runs.append(trained(trainer, [rows]))
        moved = {name for name, tensor in runs[-1][1].items() if not torch.equal(tensor, before[name])}
        assert any("visual" in name for name in moved) and any("language" in name for name in moved)
    assert runs[0][0][0] == pytest.approx(runs[1][0][0], abs=1e-5, rel=1e-5)
    assert distance(runs[0][1], runs[1][1]) < 1e-6


def _picture(pixels: np.ndarray) -> Any:
    from PIL import Image as PILImage

    return PILImage.fromarray(pixels)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_trains_on_float32_masters(make_trainer: Make, stage: int) -> None:
    """Steps too small for bfloat16's 8 bits add up in the masters and arrive."""
    sections = {"model": {"dtype": "bfloat16"}, "parallel": {"zero_stage": stage}}
    trainer = make_trainer(optim={"name": "adamw", "lr": 2e-4}, train={"micro_batch_tokens": 90}, **sections)
    assert trainer.policy.model.dtype == torch.bfloat16
    first = published(trainer)
    metrics = [trainer.train(make_rows(), step).metrics for step in range(6)]
    assert all(np.isfinite(m["policy/grad_norm"]) and m["policy/grad_norm"] > 0 for m in metrics)
    moved = [bool((published(trainer)[name] != tensor).any()) for name, tensor in first.items() if tensor.ndim > 1]
    assert all(moved)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")])
def test_what_is_kept_in_cpu_memory_trains_the_same(make_trainer: Make, stage: int, dtype: str) -> None:
    runs = []
    for offload in (False, True):
        parallel = {"zero_stage": stage, "offload_optimizer": offload, "offload_params": offload and stage == 3}
        trainer = make_trainer(optim={"name": "adamw", "lr": 1e-2}, model={"dtype": dtype}, parallel=parallel)
        settings = (
            trainer._tools.backend.engine.zero_offload_optimizer(),
            trainer._tools.backend.engine.zero_offload_param(),
        )
        assert (settings[0] is not None, settings[1] is not None) == (offload, offload and stage == 3)
        for step in range(2):
            trainer.train(make_rows(), step)
        runs.append(published(trainer))
    assert distance(*runs) < (1e-6 if dtype == "float32" else 1e-2)
