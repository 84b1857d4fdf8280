"""Two ranks with critic, reference and masks against one: real processes, gloo, every ZeRO stage that shards differently."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agentrl.trainers.group import TrainerGroup
from PIL import Image as PILImage

from agentrl import Image, Row
from agentrl.config import Config
from agentrl.image_store import ImageStore

from ..engines import tiny
from .rollouts import distance, make_row, make_rows, received

pytestmark = pytest.mark.slow
Start = Callable[..., Awaitable[TrainerGroup]]


@pytest.fixture
async def start(ray_cluster: None, models: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """start(ranks, stage): PPO with a KL in the reward, two updates a batch, clipped values, truncated rollouts masked."""
    groups: list[TrainerGroup] = []

    async def make(ranks: int = 1, stage: int = 0, path: str = "untied", **axes: Any) -> TrainerGroup:
        overlong = {"penalty": True, "mask": True}
        algo = {"name": "ppo", "lam": 0.9, "bootstrap_truncated": True, "kl": {"coef": 0.1, "target": 0.01}}
        sections: dict[str, Any] = {
            "parallel": {"ranks": ranks, "zero_stage": stage},
            "optim": {"name": "sgd", "lr": 0.1, "max_norm": 1.0},
            "critic": {"lr": 0.05, "value_clip": 0.05},
            "train": {"max_staleness": 0, "micro_batch_tokens": 60, "updates_per_batch": 2},
            "algo": algo | {"overlong": overlong} | axes,
            "rollout": {"max_total_tokens": 30},
        }
        config = Config.model_validate(sections)
        groups.append(await TrainerGroup.start(config, str(models / path), str(tmp_path / "images"), 10, 1e-3))
        return groups[-1]

    yield make
    for group in groups:
        await group.close()


def batches() -> list[list[Row]]:
    """Three batches, the last with less rollouts than a rank has steps; some rollouts are truncated."""
    made = [make_rows(), make_rows(2, 3), [make_row(i, 20, rollout=f"{i}", reward=float(i)) for i in range(3)]]
    for rows in made[:2]:
        for row in rows:
            row.truncated = row.rollout_id in ("r2", "r3")
    return made


async def test_two_ranks_train_policy_and_critic_as_one_does(start: Start, tmp_path: Path) -> None:
    single = await start()
    expected = [await single.train(rows, step) for step, rows in enumerate(batches())]
    weights = await received(single)
    await single.close()
    assert expected[2].metrics["kl/ref"] > 0 and expected[1].metrics["critic/clip_fraction"] > 0
    for stage in (0, 3):
        pair = await start(ranks=2, stage=stage)
        for step, rows in enumerate(batches()):
            report = await pair.train(rows, step)
            assert report.metrics == pytest.approx(expected[step].metrics, abs=2e-5, rel=2e-4)
            for one, other in zip(report.advantages, expected[step].advantages, strict=True):
                assert np.allclose(one, other, atol=1e-4)
        assert distance(weights, await received(pair)) < 1e-6
        if stage == 3:
            await check_resume(pair, tmp_path)
        await pair.close()


async def check_resume(pair: TrainerGroup, folder: Path) -> None:
    """Sharded critic and policy go on from a checkpoint as they would have."""
    (folder / "saved").mkdir()
    await pair.save(folder / "saved")
    first = await pair.train(make_rows(), 3)
    await pair.load(folder / "saved")
    again = await pair.train(make_rows(), 3)
    assert again.metrics == first.metrics


async def test_nan_on_one_rank_is_skipped_by_both(start: Start, tmp_path: Path) -> None:
    pair = await start(ranks=2, old_logp="rollout", kl={})
    before = await received(pair)
    rows = batches()[0]
    sick = next(row for row in rows if row.total_reward is not None and not row.truncated)
    sick.logprobs[sick.loss_mask] = np.nan
    report = await pair.train(rows, 1)
    assert not report.updated and report.metrics["policy/bad_steps"] == 1.0
    lines = (tmp_path / "bad_rows" / "step_000001.jsonl").read_text().splitlines()
    assert {json.loads(line)["rollout_id"] for line in lines} == {sick.rollout_id}
    assert distance(before, await received(pair)) == 0.0
    assert (await pair.train(batches()[0], 2)).updated
    after = await received(pair)
    assert all(tensor.isfinite().all() for tensor in after.values()) and distance(before, after) > 0.0


async def test_ranks_with_and_without_pictures_train_a_critic_together(start: Start, tmp_path: Path) -> None:
    sha = ImageStore(tmp_path / "images").put(Image(PILImage.new("RGB", (56, 56), (200, 30, 60))))
    placeholder = tiny.token_id("<|image_pad|>")
    seen = make_row(0, 55, trained=8, images=((sha, 3, 16),), placeholder=placeholder)
    rows = [seen, make_row(1, 50, reward=0.0), make_row(2, 5, reward=0.0)]
    reports = []
    for ranks, stage in ((1, 0), (2, 3)):
        group = await start(ranks, stage, "vision")
        reports.append([(await group.train(rows, step)).metrics for step in range(2)])
        await group.close()
    for report in reports[1:]:
        for one, other in zip(report, reports[0], strict=True):
            assert one == pytest.approx(other, abs=2e-5, rel=2e-4)
