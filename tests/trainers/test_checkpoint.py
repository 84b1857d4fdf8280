from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import DataError

from .rollouts import distance, make_rows, published, weights

Make = Callable[..., Any]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 2])
def test_a_resumed_trainer_goes_on_as_if_nothing_happened(
    make_trainer: Make, tmp_path: Path, optimizer: str, stage: int
) -> None:
    sections: dict[str, Any] = {
        "optim": {"name": optimizer, "lr": 1e-2, "schedule": "cosine", "max_norm": 1.0},
        "parallel": {"zero_stage": stage},
    }
    batches = [make_rows(2, 3 + i) for i in range(4)]
    straight = make_trainer(planned=6, **sections)
    for step in (0, 1):
        straight.train(batches[step], step)
    straight.publish(7)
    straight.release()
    straight.save(tmp_path)
    drawn = torch.rand(3)
    rates = [straight.train(batches[step], step).metrics["policy/lr"] for step in (2, 3)]

    resumed = make_trainer(planned=6, **sections)
    resumed.load(tmp_path)
    assert resumed.version == 7
    assert torch.equal(torch.rand(3), drawn)
    assert [resumed.train(batches[step], step).metrics["policy/lr"] for step in (2, 3)] == rates
    assert distance(weights(straight), weights(resumed)) == 0.0


@pytest.mark.parametrize(
    ("optimizer", "stage"), [("adamw", 0), ("adamw", 2), pytest.param("adamw", 3, marks=pytest.mark.slow), ("muon", 0)]
)
def test_a_resumed_trainer_has_the_options_it_is_given(
    make_trainer: Make, tmp_path: Path, optimizer: str, stage: int
) -> None:
    """Weight decay (from none), betas and eps changed at a resume hold, of the critic too; moments come from the checkpoint."""
    parallel = {"zero_stage": stage}
    first = {"name": optimizer, "lr": 1e-2}
    began = make_trainer(algo={"name": "ppo"}, optim=first, parallel=parallel)
    began.train(make_rows(), 0)
    began.save(tmp_path)
    now = first | {"weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 1e-3}
    resumed = make_trainer(algo={"name": "ppo"}, optim=now, critic={"weight_decay": 0.25}, parallel=parallel)
    resumed.load(tmp_path)
    for backend, decay in ((resumed._core.backend, 0.5), (resumed._critic.backend, 0.25)):
        groups = backend.optimizer.param_groups
        assert {group["weight_decay"] for group in groups} == {0.0, decay}
        assert {group["betas"] for group in groups if "betas" in group} == {(0.5, 0.6)}
        assert {group["eps"] for group in groups if group.get("betas")} == {1e-3}
    assert resumed.train(make_rows(), 1).updated
    with pytest.raises(DataError, match=f"written with --optim.name {optimizer}, not sgd"):
        make_trainer(optim={"name": "sgd"}, parallel=parallel).load(tmp_path)


@pytest.mark.parametrize(
    ("policy", "stage", "then", "said"),
    [
        ("untied", 2, {"dtype": "bfloat16"}, "model.dtype float32, not bfloat16"),
        ("untied", 0, {"dtype": "bfloat16"}, "model.dtype float32, not bfloat16"),
        ("vision", 0, {"freeze_vision": True}, "model.freeze-vision False, not True"),
    ],
)
def test_a_state_of_other_weights_is_an_error(
    make_trainer: Make, tmp_path: Path, policy: str, stage: int, then: dict[str, Any], said: str
) -> None:
    parallel = {"zero_stage": stage}
    make_trainer(policy, parallel=parallel).save(tmp_path)
    with pytest.raises(DataError, match=f"was written with --{said}"):
        make_trainer(policy, parallel=parallel, model=then).load(tmp_path)


def test_a_folder_without_state_is_an_error(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trainer state of 1 rank"):
        make_trainer().load(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "random_rank_0.pt", "policy.json"])
def test_a_damaged_state_is_said_to_be_so(make_trainer: Make, tmp_path: Path, name: str) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path)
    os.truncate(tmp_path / "trainer" / name, 100)
    with pytest.raises(DataError, match=f"{tmp_path.name} cannot be loaded: .*damaged"):
        trainer.load(tmp_path)


@pytest.mark.parametrize("name", ["tied", "untied", "vision"])
def test_an_export_loads_with_the_same_logits(make_trainer: Make, models: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    trainer = make_trainer(name)
    trainer.train(make_rows(), 0)
    out = tmp_path / "out"
    out.mkdir()
    trainer.export(out)
    auto = AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM
    ids = torch.arange(1, 30)[None]
    again = auto.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        live = trainer.policy.model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(again(input_ids=ids).logits, live, atol=1e-5)
    tensors = load_file(out / "model.safetensors")
    assert all(tensor.numel() for tensor in tensors.values())
    assert ("lm_head.weight" in tensors) == (name != "tied")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (models / name / file).read_bytes()
    assert (out / "generation_config.json").is_file()
    assert json.loads((out / "config.json").read_text())["architectures"]
    chat = [{"role": "user", "content": "hi"}]
    before, after = (AutoTokenizer.from_pretrained(path) for path in (models / name, out))
    assert before.apply_chat_template(chat) == after.apply_chat_template(chat)


@pytest.mark.parametrize("name", ["tied", "untied", "vision"])
def test_published_weights_have_the_names_and_values_of_an_export(
    make_trainer: Make, tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file

    trainer = make_trainer(name)
    trainer.train(make_rows(), 0)
    trainer.export(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    sent = published(trainer, version=1)
    assert trainer.version == 1
    assert sent.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in sent.items())
