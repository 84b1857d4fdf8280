"""The moving average of the weights: its value, its checkpoint, and that looking at it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers.ema import read_average
from safetensors.torch import load_file

from agentrl import DataError

from .rollouts import distance, make_rows, published

Make = Callable[..., Any]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_average_is_exported_and_saved_and_disturbs_nothing(
    make_trainer: Make, tmp_path: Path, stage: int, rank: int
) -> None:
    sections: dict[str, Any] = {"parallel": {"zero_stage": stage}, "lora": {"rank": rank}, "optim": {"lr": 0.5}}
    plain = make_trainer("untied", **sections)
    averaging = make_trainer("untied", **sections | {"optim": {"lr": 0.5, "ema": 0.75}})
    expected = published(plain)
    for step in range(2):
        plain.train(make_rows(), step)
        averaging.train(make_rows(), step)
        averaging.export(tmp_path)
        if not rank:
            expected = {name: tensor.lerp(published(plain)[name], 0.25) for name, tensor in expected.items()}
            assert distance(load_file(tmp_path / "model.safetensors"), expected) < 1e-6
    assert distance(published(plain), published(averaging)) == 0.0
    assert distance(load_file(tmp_path / "model.safetensors"), published(plain)) > 1e-3
    averaging.save(tmp_path)
    whole = read_average(tmp_path / "trainer")
    assert all((".lora_" in name) == bool(rank) and tensor.dtype == torch.float32 for name, tensor in whole.items())
    resumed = make_trainer("untied", **sections | {"optim": {"lr": 0.5, "ema": 0.75}})
    resumed.load(tmp_path)
    for name, trainer in (("a", averaging), ("b", resumed)):
        trainer.train(make_rows(), 2)
        (tmp_path / name).mkdir()
        trainer.export(tmp_path / name)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert distance(a, b) == 0.0


def test_the_average_is_of_the_weights_wherever_they_lie(make_trainer: Make, tmp_path: Path) -> None:
    """Moved to the CPU and back, as between batches on a GPU that engines use too, they lie elsewhere."""
    trainer = make_trainer("untied", optim={"lr": 0.5, "ema": 0.75})
    first = published(trainer)
    for parameter in trainer.policy.model.parameters():
        parameter.data = parameter.data.clone()
    trainer.train(make_rows(), 0)
    last = published(trainer)
    trainer.export(tmp_path)
    expected = {name: tensor.lerp(last[name], 0.25) for name, tensor in first.items()}
    assert distance(load_file(tmp_path / "model.safetensors"), expected) < 1e-6
    assert distance(published(trainer), last) == 0.0


def test_a_checkpoint_without_an_average_is_an_error(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer().save(tmp_path)
    with pytest.raises(DataError, match="no averaged weights"):
        make_trainer(optim={"ema": 0.9}).load(tmp_path)
