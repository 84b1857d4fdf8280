"""The KL to a frozen reference, in the reward and in the loss; its controller; the teacher of distillation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import compute_advantages, kl_estimate
from agentrl.trainers.slots import rollout_ids, trained_mask

from agentrl import ConfigError, Row

from .rollouts import distance, make_row, make_rows, weights

Make = Callable[..., Any]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def other(models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the vocabulary of `tied` and weights of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(models / "tied")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(models / "tied").save_pretrained(folder)
    return str(folder)


def plain_logp(path: str | Path, rows: list[Row]) -> torch.Tensor:
    """Log-probs [B, L] of trained tokens by plain forward passes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()
        with torch.no_grad():
            logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        found.append(logp[:-1].gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def returns(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([float("nan") if row.total_reward is None else row.total_reward for row in rows])


def check_advantages(report: Any, rows: list[Row], expected: torch.Tensor) -> None:
    for row, want, got in zip(rows, expected, report.advantages, strict=True):
        assert np.allclose(got[row.loss_mask], want[: row.loss_mask.sum()].numpy(), atol=1e-4)


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "grpo"])
def test_kl_in_the_reward_is_k1_to_go(make_trainer: Make, models: Path, other: str, algorithm: str) -> None:
    rows = make_rows()
    algo = {"name": algorithm, "kl": {"coef": 0.1}}
    sections = {"algo": algo, "ref": {"path": other, "offload": True}, "rollout": {"temperature": TEMPERATURE}}
    report = make_trainer(train={"micro_batch_tokens": 90}, **sections).train(rows, 0)
    logp, ref = plain_logp(models / "tied", rows), plain_logp(other, rows)
    found = compute_advantages(
        algorithm,
        returns(rows),
        trained_mask(rows),
        group_ids=[row.group_id for row in rows],
        rollout_ids=rollout_ids(rows),
        kl=kl_estimate(logp, ref, "k1"),
        kl_coef=0.1,
    )
    check_advantages(report, rows, found.advantages)
    used = trained_mask(rows) & found.valid[:, None]
    assert report.metrics["kl/ref"] == pytest.approx(float(kl_estimate(logp, ref, "k3")[used].mean()), rel=1e-4)
    assert report.metrics["kl/coef"] == 0.1


def test_behaviour_log_probs_stand_for_the_policy_where_they_are_the_proximal_one(
    make_trainer: Make, other: str
) -> None:
    rows = make_rows()
    algo = {"name": "rloo", "old_logp": "rollout", "kl": {"coef": 0.1}}
    sections = {"algo": algo, "ref": {"path": other}, "rollout": {"temperature": TEMPERATURE}}
    report = make_trainer(**sections).train(rows, 0)
    kl = kl_estimate(torch.full(trained_mask(rows).shape, -5.5), plain_logp(other, rows), "k1")
    options = {"group_ids": [row.group_id for row in rows], "rollout_ids": rollout_ids(rows)}
    found = compute_advantages("rloo", returns(rows), trained_mask(rows), kl=kl, kl_coef=0.1, **options)
    check_advantages(report, rows, found.advantages)


def test_kl_in_the_loss_has_the_gradient_of_reverse_kl(make_trainer: Make, models: Path, other: str) -> None:
    """Equal rewards, so nothing but the KL moves the weights: one sgd step along d * grad(logp), d = log policy - log ref."""
    rows = [make_row(i, 15 + 5 * i) for i in range(4)]
    algo = {"name": "grpo", "aggregation": "token_mean", "kl": {"coef": 0.5, "where": "loss"}}
    sections = {"algo": algo, "ref": {"path": other}, "rollout": {"temperature": TEMPERATURE}}
    trainer = make_trainer(train={"micro_batch_tokens": 40}, **sections)
    before = weights(trainer)
    report = trainer.train(rows, 0)
    assert report.updated and not any(advantages.any() for advantages in report.advantages)
    model, mask = make_trainer().policy.model, trained_mask(rows)
    d = plain_logp(models / "tied", rows) - plain_logp(other, rows)
    total = torch.zeros(())
    for row, weight in zip(rows, d, strict=True):
        ids = torch.from_numpy(row.token_ids).long()
        logp = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total + (logp[torch.from_numpy(row.loss_mask[1:])] * weight[: row.loss_mask.sum()]).sum()
    (0.5 * total / mask.sum()).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights(trainer)[name], before[name] - 0.1 * parameter.grad, atol=1e-6), name
    k3 = float(kl_estimate(d, torch.zeros_like(d), "k3")[mask].mean())
    assert report.metrics["kl/ref"] == pytest.approx(k3, rel=1e-4)


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_reference_is_the_policy_of_the_start_and_stays(make_trainer: Make, where: str) -> None:
    trainer = make_trainer(algo={"kl": {"coef": 0.1, "where": where}}, optim={"lr": 1.0})
    assert trainer.train(make_rows(), 0).metrics["kl/ref"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.train(make_rows(), 1).metrics["kl/ref"] > 1e-4


def test_a_coefficient_of_zero_loads_no_reference(make_trainer: Make) -> None:
    trainer = make_trainer()
    assert trainer._judges.reference is None
    assert not any(name.startswith("kl/") for name in trainer.train(make_rows(), 0).metrics)


@pytest.mark.parametrize("where", ["reward", "loss"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_kl_does_not_depend_on_the_cut(make_trainer: Make, other: str, where: str, aggregation: str) -> None:
    algo = {"name": "grpo", "aggregation": aggregation, "kl": {"coef": 0.2, "where": where}}
    runs = []
    for budget in (100_000, 60):
        train = {"micro_batch_tokens": budget, "updates_per_batch": 2}
        trainer = make_trainer(algo=algo, ref={"path": other}, train=train)
        runs.append((trainer.train(make_rows(), 0).metrics, weights(trainer)))
    assert distance(runs[0][1], runs[1][1]) < 1e-6
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-5, rel=1e-4)


def test_the_controller_steers_and_is_resumed(make_trainer: Make, other: str, tmp_path: Path) -> None:
    sections = {"algo": {"kl": {"coef": 0.1, "target": 1e-6, "horizon": 100.0}}, "ref": {"path": other}}
    trainer = make_trainer(**sections)
    rows = make_rows()
    count = len({row.rollout_id for row in rows})
    used = [trainer.train(rows, step).metrics["kl/coef"] for step in range(2)]
    assert used == pytest.approx([0.1, 0.1 * (1 + 0.2 * count / 100)])
    trainer.save(tmp_path)
    expected = trainer.train(rows, 2).metrics
    resumed = make_trainer(**sections)
    resumed.load(tmp_path)
    assert resumed.train(rows, 2).metrics == expected


def test_a_student_descends_the_reverse_kl_from_its_teacher(make_trainer: Make, models: Path, other: str) -> None:
    rows = make_rows()
    sections = {"teacher": {"path": other}, "rollout": {"temperature": TEMPERATURE}, "optim": {"lr": 0.3}}
    trainer = make_trainer(algo={"name": "distill"}, **sections)
    report = trainer.train(rows, 0)
    gap = plain_logp(other, rows) - plain_logp(models / "tied", rows)
    judged = torch.tensor([row.total_reward is not None for row in rows])
    check_advantages(report, rows, torch.where(judged[:, None], gap, 0.0))
    first = report.metrics["kl/teacher"]
    for step in range(1, 6):
        last = trainer.train(rows, step).metrics["kl/teacher"]
    assert last < first


def test_a_teacher_has_to_be_named(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"--teacher\.path"):
        make_trainer(algo={"name": "distill"})


def test_one_reference_score_that_is_no_number_is_named_alone(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whitening would carry it into every advantage of the batch: the step is skipped."""
    trainer, rows = make_trainer(algo={"kl": {"coef": 0.1}}), make_rows()
    before, honest = weights(trainer), trainer._judges.reference.log_probs

    def sick(asked: list[Row]) -> list[torch.Tensor]:
        return [logp * (torch.nan if row is rows[3] else 1.0) for row, logp in zip(asked, honest(asked), strict=True)]

    monkeypatch.setattr(trainer._judges.reference, "log_probs", sick)
    report = trainer.train(rows, 1)
    assert not report.updated and distance(before, weights(trainer)) == 0.0
    assert report.metrics["rollouts/not_finite"] == 1.0
    lines = (tmp_path / "bad_rows" / "step_000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == [rows[3].rollout_id]
