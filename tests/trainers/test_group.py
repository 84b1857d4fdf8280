from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers.group import TrainerGroup
from PIL import Image as PILImage

from agentrl import ConfigError, DataError, Image, InfrastructureError
from agentrl.config import Config
from agentrl.image_store import ImageStore

from ..engines import tiny
from .rollouts import distance, make_row, make_rows, published, received

Start = Callable[..., Awaitable[TrainerGroup]]


def test_importing_the_group_loads_neither_torch_nor_ray() -> None:
    code = "import sys, agentrl.trainers.group; assert not {'torch', 'ray', 'deepspeed'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def settings(**more: dict[str, Any]) -> dict[str, Any]:
    """lr 0.1, sgd, micro-batches of 60 tokens, with more sections and options."""
    sections: dict[str, dict[str, Any]] = {
        "optim": {"name": "sgd", "lr": 0.1, "max_norm": 1.0},
        "train": {"max_staleness": 0, "micro_batch_tokens": 60},
        "algo": {"name": "grpo", "old_logp": "rollout"},
    }
    return {name: sections.get(name, {}) | more.get(name, {}) for name in {**sections, **more}}


@pytest.fixture
async def start(ray_cluster: None, models: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """start(ranks=1, stage=0, **sections): a group with the untied policy and `settings`."""
    groups: list[TrainerGroup] = []

    async def make(ranks: int = 1, stage: int = 0, path: str = "untied", **more: dict[str, Any]) -> TrainerGroup:
        sections = settings(parallel={"ranks": ranks, "zero_stage": stage}, **more)
        config = Config.model_validate(sections)
        groups.append(await TrainerGroup.start(config, str(models / path), str(tmp_path / "images"), 10, 1e-3))
        return groups[-1]

    yield make
    for group in groups:
        await group.close()


@pytest.mark.slow
async def test_convention_08_two_ranks_train_as_one_does_at_every_stage(start: Start, tmp_path: Path) -> None:
    batches = [make_rows(), [make_row(i, 20, rollout=f"{i}", reward=float(i)) for i in range(3)]]
    single = await start()
    expected = [await single.train(rows, step) for step, rows in enumerate(batches)]
    weights = await received(single)
    await single.close()
    for stage in range(4):
        pair = await start(ranks=2, stage=stage)
        for step, rows in enumerate(batches):
            report = await pair.train(rows, step)
            assert report.metrics == pytest.approx(expected[step].metrics, abs=1e-5, rel=1e-5)
        assert distance(weights, await received(pair)) < 1e-6
        await pair.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "sections", "tolerance"),
    [
        (3, {"lora": {"rank": 4}, "optim": {"ema": 0.5}}, 1e-6),
        (0, {"optim": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}}, 1e-4),
        *(
            (stage, {"optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}}, 1e-5)
            for stage in (0, 3)
        ),
    ],
    ids=["lora", "muon", "adamw-0", "adamw-3"],
)
async def test_two_ranks_train_with_other_optimizers_and_adapters_as_one_does(
    start: Start,
    make_trainer: Callable[..., Any],
    tmp_path: Path,
    stage: int,
    sections: dict[str, Any],
    tolerance: float,
) -> None:
    """Weights agree to 1e-6 with sgd, and to a hundredth of the learning rate where a step does not shrink with the gradient.

    AdamW steps by lr * g / (|g| + eps) at first: where |g| is near eps, the rounding of its sum, which is of another order
    on each number of ranks, is as large as g. Hence an eps that is well above it (1e-9 here).
    """
    from safetensors.torch import load_file

    single, pair = make_trainer("untied", 10, **settings(**sections)), await start(2, stage, **sections)
    for step in range(2):
        single.train(make_rows(), step)
        await pair.train(make_rows(), step)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    single.export(tmp_path / "one")
    await pair.export(tmp_path / "two")
    weights = await received(pair)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert distance(published(single), weights) < tolerance
    assert distance(one, two) < tolerance
    assert (distance(weights, two) > 1e-4) == ("ema" in sections["optim"])


@pytest.mark.slow
async def test_at_adamw_s_usual_epsilon_ranks_differ_only_where_a_gradient_is_lost_in_rounding(
    start: Start, make_trainer: Callable[..., Any]
) -> None:
    """All but a weight in ten thousand agree to a hundredth of lr; those are where |g| is below the rounding of its sum."""
    sections = {"optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}}
    single, pair = make_trainer("untied", 10, **settings(**sections)), await start(2, 2, **sections)
    single.train(make_rows(), 0)
    await pair.train(make_rows(), 0)
    one, two = published(single), await received(pair)
    apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert (apart > 1e-5).float().mean() < 1e-4
    assert apart.max() < 2e-4


@pytest.mark.slow
async def test_ranks_with_and_without_pictures_train_a_vision_model_together(start: Start, tmp_path: Path) -> None:
    sha = ImageStore(tmp_path / "images").put(Image(PILImage.new("RGB", (56, 56), (200, 30, 60))))
    placeholder = tiny.token_id("<|image_pad|>")
    seen = make_row(0, 55, trained=8, images=((sha, 3, 16),), placeholder=placeholder)
    rows = [seen, make_row(1, 50, reward=0.0), make_row(2, 5, reward=0.0)]
    weights: list[dict[str, torch.Tensor]] = []
    for ranks, stage in ((1, 0), (2, 0), (2, 2), (2, 3)):
        group = await start(ranks, stage, "vision")
        await group.train(rows, 0)
        weights.append(await received(group))
        assert distance(weights[0], weights[-1]) < 1e-6
        await group.close()


@pytest.mark.slow
async def test_two_ranks_at_stage_3_save_load_and_export(start: Start, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pair = await start(ranks=2, stage=3)
    await pair.train(make_rows(), 0)
    await pair.save(tmp_path)
    (tmp_path / "out").mkdir()
    await pair.export(tmp_path / "out")
    before = await received(pair)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert distance(before, dict(model.state_dict())) == 0.0
    await pair.train(make_rows(), 1)
    after = await received(pair)
    await pair.load(tmp_path)
    assert distance(before, await received(pair)) == 0.0
    await pair.train(make_rows(), 1)
    assert distance(after, await received(pair)) == 0.0
    await pair.close()
    single = await start()
    with pytest.raises(DataError, match="no trainer state of 1 rank"):
        await single.load(tmp_path)


@pytest.mark.slow
async def test_errors_of_ours_come_through(start: Start) -> None:
    group = await start()
    with pytest.raises(ConfigError, match="micro-batch-tokens 60"):
        await group.train([make_row(0, 61), make_row(1, 20, reward=0.0)], 0)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
async def test_the_rank_that_died_is_named(start: Start, dead: int) -> None:
    group = await start(ranks=2)
    pid = int(group._ranks[dead].where.rsplit(" ", 1)[-1])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match=rf"trainer rank {dead} \(.*pid {pid}\) died: "):
        await group.train(make_rows(), 0)


@pytest.mark.slow
async def test_a_model_that_cannot_be_read_leaves_no_actor_behind(start: Start) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    with pytest.raises(DataError, match="nowhere"):
        await start(path="nowhere")
    await asyncio.wait_for(asyncio.to_thread(_wait_for_cpus, free), 30)


def _wait_for_cpus(count: float) -> None:
    """Ray counts the processors of ended actors as free a moment later."""
    import ray

    while ray.available_resources()["CPU"] < count:
        time.sleep(0.2)
