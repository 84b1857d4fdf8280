"""LoRA: what trains, what is published and saved, and the model it started from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers.packing import split_packs
from safetensors.torch import load_file

from agentrl import ConfigError, DataError

from .rollouts import distance, make_row, make_rows, published, weights

Make = Callable[..., Any]
LORA: dict[str, Any] = {"lora": {"rank": 4}, "optim": {"lr": 1.0}}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(1, 30)[None], use_cache=False).logits
    return result


@pytest.mark.parametrize("name", ["tied", "untied", "vision"])
def test_only_adapters_train_and_merged_weights_are_published(make_trainer: Make, models: Path, name: str) -> None:
    trainer = make_trainer(name, **LORA)
    base = load_file(models / name / "model.safetensors")
    first = published(trainer)
    assert first.keys() == base.keys() and distance(first, base) == 0.0
    before = weights(trainer)
    assert trainer.train(make_rows(), 0).updated
    moved = {key for key, tensor in weights(trainer).items() if not torch.equal(tensor, before[key])}
    assert moved and all(".lora_" in key for key in moved)
    after, live = published(trainer, 1), weights(trainer)
    changed = {key for key in base if not torch.equal(after[key], base[key])}
    assert changed and all(key.endswith("_proj.weight") for key in changed)
    key = next(key for key in sorted(changed) if "layers.1.self_attn.v_proj" in key)
    (low, high) = (
        live[name]
        for name in sorted(live)
        if "language_model.layers.1.self_attn.v_proj.lora" in name.replace("model.layers", "language_model.layers")
    )
    assert torch.allclose(after[key], base[key] + 2.0 * high @ low, atol=1e-6)


@pytest.mark.parametrize("name", ["tied", "vision"])
def test_an_export_is_the_merged_model_with_the_adapter_beside_it(
    make_trainer: Make, models: Path, tmp_path: Path, name: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM
    trainer = make_trainer(name, **LORA)
    trainer.train(make_rows(), 0)
    trainer.export(tmp_path)
    live, base = logits(trainer.policy.model), auto.from_pretrained(models / name, dtype=torch.float32)
    assert float((logits(base) - live).abs().max()) > 1e-2
    merged = auto.from_pretrained(tmp_path, dtype=torch.float32)
    assert not hasattr(merged, "peft_config")
    assert torch.allclose(logits(merged), live, atol=1e-4)
    assert torch.allclose(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), live, atol=1e-5)
    again = make_trainer(name, lora={"path": str(tmp_path / "adapter")})
    assert torch.equal(logits(again.policy.model), live)
    again.train(make_rows(), 0)
    assert distance(weights(again), weights(trainer)) > 0


def test_publishing_and_looking_at_the_base_model_leave_training_as_it_was(make_trainer: Make, models: Path) -> None:
    from transformers import AutoModelForCausalLM

    runs = []
    for looks in (False, True):
        trainer = make_trainer(parallel={"zero_stage": 2}, **LORA)
        for step in range(3):
            trainer.train(make_rows(), step)
            if looks:
                published(trainer, step)
                with trainer.policy.without_adapters():
                    base = logits(trainer.policy.model)
        runs.append(weights(trainer))
    assert distance(*runs) == 0.0
    assert torch.equal(base, logits(AutoModelForCausalLM.from_pretrained(models / "tied", dtype=torch.float32)))
    with pytest.raises(ValueError, match="no adapters"), make_trainer().policy.without_adapters():
        pass


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_reference_is_the_model_with_adapters_off(make_trainer: Make, models: Path, stage: int, where: str) -> None:
    """The same run with a copy of the model as its reference, which is loaded by its path."""
    runs, reports = [], []
    kl = {"coef": 0.3, "where": where}
    for ref in ({}, {"path": str(models / "untied")}):
        trainer = make_trainer(
            "untied", algo={"name": "grpo", "kl": kl}, ref=ref, parallel={"zero_stage": stage}, **LORA
        )
        reports.append([trainer.train(make_rows(), step).metrics for step in range(3)])
        runs.append(published(trainer))
    assert reports[0][2]["kl/ref"] > 1e-4
    assert reports[0][2]["kl/ref"] == pytest.approx(reports[1][2]["kl/ref"], rel=1e-4)
    assert distance(*runs) < 1e-6


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_holds_the_adapters_alone(make_trainer: Make, tmp_path: Path, stage: int) -> None:
    sections = {**LORA, "parallel": {"zero_stage": stage}, "optim": {"name": "adamw", "lr": 1e-2}}
    straight = make_trainer("untied", **sections)
    straight.train(make_rows(), 0)
    straight.save(tmp_path)
    state = torch.load(next((tmp_path / "trainer").glob("*model_states.pt")), weights_only=False)
    assert all(".lora_" in name for name in state["module"])
    straight.train(make_rows(), 1)
    resumed = make_trainer("untied", **sections)
    resumed.load(tmp_path)
    resumed.train(make_rows(), 1)
    assert distance(published(straight), published(resumed)) == 0.0
    with pytest.raises(DataError, match="other --lora options"):
        make_trainer("untied", **{**sections, "lora": {}}).load(tmp_path)


def test_dropout_acts_in_updates_alone(make_trainer: Make, tmp_path: Path) -> None:
    """Neither what is compared with the engines nor the off-policy correction sees it, whatever the adapter's own."""
    plain, dropping = (make_trainer(lora={"rank": 4, "dropout": rate}, optim={"lr": 1.0}) for rate in (0.0, 0.5))
    for step in range(2):
        plain.train(make_rows(), step)
        dropping.train(make_rows(), step)
    assert distance(weights(plain), weights(dropping)) > 1e-4
    packs = split_packs(make_rows(), dropping.policy, None)
    score = dropping._tools.backend
    assert not torch.equal(score(packs)[0], score(packs)[0])
    rows = make_rows()
    with torch.no_grad():
        assert torch.equal(score(packs)[0], score(packs)[0])
        engine = torch.cat([score(split_packs([row], dropping.policy, None))[0] for row in rows])
    for row, logp in zip(rows, engine.split([int(row.loss_mask.sum()) for row in rows]), strict=True):
        row.logprobs[row.loss_mask] = logp.numpy()
    dropping.export(tmp_path)
    again = make_trainer(lora={"path": str(tmp_path / "adapter"), "dropout": 0.3}, algo={"correction": "icepop"})
    metrics = again.train(rows, 0).metrics
    assert metrics["mismatch/max_abs"] < 1e-5 and metrics["correction/zeroed"] == 0.0
    plain.export(tmp_path / "plain")
    settings = tmp_path / "plain" / "adapter" / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.3'))
    undisturbed = make_trainer(lora={"path": str(settings.parent)})
    assert torch.equal(*(undisturbed._tools.backend(packs)[0] for _ in range(2)))


@pytest.mark.parametrize(
    ("targets", "said"),
    [(["q_prj"], "lora.targets q_prj.*Did you mean q_proj"), (["q_proj", "lm_head"], "shares its weight")],
)
def test_targets_that_cannot_be_are_named(make_trainer: Make, targets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trainer(lora={"rank": 4, "targets": targets})


def test_the_head_of_an_untied_model_may_be_adapted(make_trainer: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer("untied", lora={"rank": 4, "targets": ["lm_head", "v_proj"]}, optim={"lr": 1.0})
    trainer.train([make_row(i, 30, reward=float(i % 2)) for i in range(4)], 0)
    trainer.export(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(logits(merged), logits(trainer.policy.model), atol=1e-4)


def test_a_folder_without_an_adapter_is_an_error(make_trainer: Make, models: Path) -> None:
    with pytest.raises(DataError, match="holds no adapter"):
        make_trainer(lora={"path": str(models / "tied")})


def test_adapters_and_muon_train_beside_a_critic_of_its_own(make_trainer: Make) -> None:
    trainer = make_trainer("untied", algo={"name": "ppo"}, lora={"rank": 4}, optim={"name": "muon", "lr": 1e-2})
    before = published(trainer)
    report = trainer.train(make_rows(), 0)
    report = trainer.train(make_rows(), 1)
    assert report.updated and report.metrics["critic/loss"] > 0
    assert distance(before, published(trainer)) > 1e-3
