"""What is ordered and what comes back: plain values that cross process borders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..engine import Limits, Sampling
from ..env import Task
from ..executor import describe_error
from ..trajectory import Row, Trajectory


@dataclass(frozen=True)
class EpisodeOrder:
    """One episode to play. Everything random in it is fixed by `env_seed` and `seed`, so a retry repeats it."""

    rollout_id: str
    group_id: str
    draw: int
    sample: int
    task: Task
    env_seed: int
    seed: int
    sampling: Sampling
    limits: Limits
    engine: int = 0
    training: bool = True


@dataclass
class EpisodeResult:
    """How an episode ended. `error` is None or the plain values of `describe_error`; failed episodes have no rows to train."""

    rollout_id: str
    group_id: str
    draw: int
    sample: int
    task_id: str
    env: str
    rows: list[Row] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    total_reward: float | None = None
    score: float | None = None
    truncated: bool = False
    finish_reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    turns: int = 0
    seconds: float = 0.0

    @property
    def has_verdict(self) -> bool:
        return self.error is None and self.total_reward is not None

    @property
    def retryable(self) -> bool:
        return self.error is not None and bool(self.error["retryable"])

    @property
    def sampled_tokens(self) -> int:
        return sum(int(row.loss_mask.sum()) for row in self.rows)


def result_of(order: EpisodeOrder, trajectory: Trajectory, seconds: float) -> EpisodeResult:
    """The plain values of a played trajectory."""
    error = trajectory.error
    return EpisodeResult(
        rollout_id=order.rollout_id,
        group_id=order.group_id,
        draw=order.draw,
        sample=order.sample,
        task_id=trajectory.task.id,
        env=trajectory.env,
        rows=trajectory.rows(),
        messages=trajectory.messages,
        tools=trajectory.tools,
        total_reward=trajectory.total_reward,
        score=trajectory.score,
        truncated=trajectory.truncated,
        finish_reason=trajectory.finish_reason,
        metrics=trajectory.metrics,
        error=None if error is None else describe_error(error),
        turns=len(trajectory.sampled),
        seconds=seconds,
    )


def failed(order: EpisodeOrder, error: BaseException) -> EpisodeResult:
    """The result of an episode that never came back."""
    described = describe_error(error)
    task = order.task
    return EpisodeResult(order.rollout_id, order.group_id, order.draw, order.sample, task.id, task.env, error=described)
