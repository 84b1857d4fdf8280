"""Rows as a rollout worker would give them, made from a seed; and what a trainer's weights are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from agentrl.trainers.group import TrainerGroup

from agentrl import Row
from agentrl.engines.weights import WeightReader
from agentrl.trajectory import ImageSlot


def make_row(
    seed: int,
    length: int,
    *,
    trained: int = 0,
    rollout: str = "",
    group: str = "g",
    reward: float | None = 1.0,
    version: int = 0,
    images: tuple[ImageSlot, ...] = (),
    placeholder: int = 0,
) -> Row:
    """Random bytes; the last `trained` tokens (a third of them unless told) were sampled by `version` at log-prob -5.5."""
    ids = np.random.default_rng(seed).integers(1, 256, length).astype(np.int32)
    mask = np.zeros(length, np.bool_)
    mask[length - (trained or max(1, length // 3)) :] = True
    for _, start, count in images:
        ids[start : start + count] = placeholder
        mask[start : start + count] = False
    return Row(
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -5.5, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        rewards=np.zeros(length, np.float32),
        images=list(images),
        rollout_id=rollout or f"rollout {seed}",
        group_id=group,
        total_reward=reward,
        score=reward,
    )


def make_rows(groups: int = 3, members: int = 4) -> list[Row]:
    """Rollouts of one or two rows, of uneven lengths, rewards 0, 1 and in one case none."""
    rows = []
    for i in range(groups * members):
        reward = None if i == 5 else float(i % 3 == 0)
        about: dict[str, Any] = {"rollout": f"r{i}", "group": f"g{i // members}", "reward": reward}
        rows += [make_row(100 * i + part, 12 + (7 * i + part) % 23, **about) for part in range(1 + i % 2)]
    return rows


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the trained weights."""
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def published(trainer: Any, version: int = 0) -> dict[str, torch.Tensor]:
    """A copy of what an engine would get."""
    reader = WeightReader(trainer.publish(version))
    tensors = {name: tensor.clone() for name, tensor in reader.tensors()}
    reader.close()
    trainer.release()
    return tensors


async def received(group: TrainerGroup) -> dict[str, torch.Tensor]:
    """The weights as an engine would get them."""
    source = await group.publish(1)
    reader = WeightReader(source)
    tensors = {name: tensor.clone() for name, tensor in reader.tensors()}
    reader.close()
    await group.release(source)
    return tensors
