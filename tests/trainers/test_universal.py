"""Checkpoints for another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl.trainers.group import SupervisedGroup, TrainerGroup
from agentrl.trainers.universal import universal_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from agentrl import ConfigError, DataError
from agentrl.checkpoint import RunState
from agentrl.cli.main import run
from agentrl.config import Config, SftConfig
from agentrl.supervised.examples import Item

from .rollouts import distance, make_row, make_rows, published


def batch(step: int) -> list[Item]:
    return [make_row(10 * step + i, 12 + 5 * i) for i in range(4)]


async def started(path: Path, ranks: int, stage: int, images: Path) -> SupervisedGroup:
    optim = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}
    sections = {"parallel": {"ranks": ranks, "zero_stage": stage}, "optim": optim, "train": {"micro_batch_tokens": 64}}
    config = SftConfig.model_validate({**sections, "train": {"micro_batch_tokens": 64, "max_len": 64}})
    return await SupervisedGroup.start(config, str(path), str(images), 10, 1e-3)


async def saved(group: SupervisedGroup, folder: Path, step: int) -> Path:
    folder.mkdir()
    await group.save(folder)
    (folder / "run.json").write_text(json.dumps(RunState(step=step).__dict__))
    return folder


def test_an_optimizer_that_deepspeed_does_not_convert_is_an_error_and_leaves_nothing(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(parallel={"zero_stage": 1})
    trainer.train(make_rows(), 0)
    trainer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"optim\.name adamw alone"):
        universal_checkpoint(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_updates_after_it_are_those_of_the_run(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Of matrices and of vectors, which have a counter of steps each."""
    sections: dict[str, Any] = {"optim": {"name": "adamw", "lr": 1e-2}, "parallel": {"zero_stage": 3}}
    straight, resumed = (make_trainer("untied", **sections) for _ in range(2))
    straight.train(make_rows(), 0)
    straight.save(tmp_path)
    universal_checkpoint(tmp_path, tmp_path / "any")
    resumed.load(tmp_path / "any")
    for step in (1, 2):
        straight.train(make_rows(), step)
        resumed.train(make_rows(), step)
    assert distance(published(straight), published(resumed)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
async def test_CKP_04_two_ranks_go_on_as_one_and_one_as_two(
    ray_cluster: None, models: Path, tmp_path: Path, stage: int
) -> None:
    """After each change of the number of ranks the updates are those of the run that kept its own."""
    images = tmp_path / "images"
    pair = await started(models / "untied", 2, stage, images)
    reports = [await pair.train(batch(step), step) for step in range(2)]
    first = await saved(pair, tmp_path / "first", 2)
    reports += [await pair.train(batch(step), step) for step in range(2, 4)]
    await pair.close()
    single = await started(models / "untied", 1, stage, images)
    with pytest.raises(DataError, match="agentrl ckpt universal"):
        await single.load(first)
    assert run(["ckpt", "universal", str(first), str(tmp_path / "any")]) == 0
    await single.load(tmp_path / "any")
    again = await single.train(batch(2), 2)
    assert again.metrics == pytest.approx(reports[2].metrics, rel=1e-4, abs=1e-5)
    second = await saved(single, tmp_path / "second", 3)
    await single.close()
    assert run(["ckpt", "universal", str(second), str(tmp_path / "other")]) == 0
    pair = await started(models / "untied", 2, stage, images)
    await pair.load(tmp_path / "other")
    again = await pair.train(batch(3), 3)
    assert again.metrics == pytest.approx(reports[3].metrics, rel=1e-4, abs=1e-5)
    await pair.close()
    assert run(["ckpt", "universal", str(tmp_path / "other"), str(tmp_path / "third")]) == 2
    for checkpoint in ("second", "other"):
        assert run(["export", str(tmp_path / checkpoint), str(tmp_path / f"{checkpoint}-model")]) == 0
    of_one, of_any = (load_file(tmp_path / f"{name}-model" / "model.safetensors") for name in ("second", "other"))
    assert of_one.keys() == of_any.keys() and distance(of_one, of_any) == 0.0


async def learned(path: Path, ranks: int, stage: int, images: Path) -> TrainerGroup:
    sections: dict[str, Any] = {
        "algo": {"name": "ppo"},
        "lora": {"rank": 2},
        "optim": {"name": "adamw", "lr": 1e-2, "eps": 1e-4, "ema": 0.5},
        "train": {"max_staleness": 0, "micro_batch_tokens": 60},
        "parallel": {"ranks": ranks, "zero_stage": stage},
    }
    return await TrainerGroup.start(Config.model_validate(sections), str(path), str(images), 10, 1e-3)


async def exported(group: TrainerGroup, folder: Path) -> dict[str, Tensor]:
    """The averaged weights, adapters merged."""
    folder.mkdir()
    await group.export(folder)
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
async def test_CKP_04_critic_adapters_and_average_too(
    ray_cluster: None, models: Path, tmp_path: Path, stage: int
) -> None:
    pair = await learned(models / "untied", 2, stage, tmp_path / "images")
    for step in range(2):
        await pair.train(make_rows(), step)
    first = await saved(pair, tmp_path / "first", 2)
    expected = await pair.train(make_rows(), 2)
    whole = await exported(pair, tmp_path / "two")
    await pair.close()
    assert run(["ckpt", "universal", str(first), str(tmp_path / "any")]) == 0
    single = await learned(models / "untied", 1, stage, tmp_path / "images")
    await single.load(tmp_path / "any")
    again = await single.train(make_rows(), 2)
    assert again.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert distance(whole, await exported(single, tmp_path / "one")) < 1e-5
    await single.close()
