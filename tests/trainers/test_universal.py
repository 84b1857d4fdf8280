"""Checkpoints for another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agentrl.trainers.group import SupervisedGroup

from agentrl import DataError
from agentrl.checkpoint import RunState
from agentrl.cli.main import run
from agentrl.config import SftConfig
from agentrl.supervised.examples import Item

from .rollouts import make_row


def batch(step: int) -> list[Item]:
    return [make_row(10 * step + i, 12 + 5 * i) for i in range(4)]


async def started(path: Path, ranks: int, stage: int, images: Path) -> SupervisedGroup:
    optim = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    sections = {"parallel": {"ranks": ranks, "zero_stage": stage}, "optim": optim, "train": {"micro_batch_tokens": 64}}
    config = SftConfig.model_validate({**sections, "train": {"micro_batch_tokens": 64, "max_len": 64}})
    return await SupervisedGroup.start(config, str(path), str(images), 10, 1e-3)


async def saved(group: SupervisedGroup, folder: Path, step: int) -> Path:
    folder.mkdir()
    await group.save(folder)
    (folder / "run.json").write_text(json.dumps(RunState(step=step).__dict__))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
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
