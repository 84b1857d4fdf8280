"""Episodes and groups from a few plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentrl.env import Task
from agentrl.rollout.episode import EpisodeResult
from agentrl.rollout.group import Group
from agentrl.trajectory import Row


def row(sampled: int = 3, prompt: int = 2, version: int = 0, versions: list[int] | None = None) -> Row:
    """`prompt` tokens, then `sampled` trained ones of `version`, or of one version each."""
    total = prompt + sampled
    mask = np.arange(total) >= prompt
    return Row(
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, [0] * prompt + (versions or [version] * sampled), -1).astype(np.int32),
        rewards=np.zeros(total, dtype=np.float32),
    )


def episode(
    reward: float | None = 1.0,
    *,
    group: str = "g",
    sample: int = 0,
    score: float | None = None,
    error: str | None = None,
    rows: list[Row] | None = None,
    **values: Any,
) -> EpisodeResult:
    """An episode with one row; its score is the reward unless given. `error` = the class of what failed it."""
    failure = None if error is None else {"class": error, "message": "m", "retryable": False, "traceback": "t"}
    return EpisodeResult(
        rollout_id=f"{group}-{sample}",
        group_id=group,
        draw=0,
        sample=sample,
        task_id="t",
        env="e",
        rows=[row()] if rows is None else rows,
        total_reward=reward,
        score=reward if score is None else score,
        error=failure,
        turns=1,
        **values,
    )


def group(*results: EpisodeResult, draw: int = 0, outcome: str = "trained") -> Group:
    return Group(draw, Task("t"), len(results), 0, list(results), outcome)
