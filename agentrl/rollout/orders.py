"""Episode orders, made in one place: ids, seeds, sampling and engine of everything that is played."""

from __future__ import annotations

from ..config import Config, RolloutSection
from ..engine import Limits, Sampling
from ..env import Task
from ..seeds import derive, env_seed, sampling_seed
from .episode import EpisodeOrder


def draw_id(draw: int) -> str:
    """The group id of a task draw."""
    return f"{draw:06d}"


def rollout_sampling(rollout: RolloutSection) -> Sampling:
    """How training episodes are sampled. Training refuses what cuts the distribution; `agentrl rollout` does not."""
    return Sampling(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )


def draw_order(config: Config, limits: Limits, draw: int, sample: int, task: Task, engine: int = 0) -> EpisodeOrder:
    """One member of a draw's group. But for the engine it depends on the seed, the draw and the sample, so a retry or a
    resume repeats it.
    """
    seed = config.run.seed
    return EpisodeOrder(
        rollout_id=f"{draw_id(draw)}-{sample}",
        group_id=draw_id(draw),
        draw=draw,
        sample=sample,
        task=task,
        env_seed=env_seed(seed, draw),
        seed=sampling_seed(seed, draw, sample),
        sampling=rollout_sampling(config.rollout),
        limits=limits,
        engine=engine,
    )


def evaluation_order(
    config: Config, limits: Limits, index: int, sample: int, task: Task, sampling: Sampling
) -> EpisodeOrder:
    """One episode of held-out task `index`, with seeds that no training episode has. Greedy ones have ids of their own."""
    seed = config.run.seed
    member = str(sample) if sampling.temperature > 0 or config.eval.temperature == 0 else f"greedy-{sample}"
    return EpisodeOrder(
        rollout_id=f"eval-{index:05d}-{member}",
        group_id=f"eval-{index:05d}",
        draw=index,
        sample=sample,
        task=task,
        env_seed=derive(seed, "eval env", index),
        seed=derive(seed, "eval", index, sample),
        sampling=sampling,
        limits=limits,
        engine=index % config.engine.count,
        training=False,
    )
