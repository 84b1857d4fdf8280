"""One trajectory as a line of JSON: what was said, sampled, earned and trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages import message_record
from ..rollout.episode import EpisodeResult
from ..rollout.group import Batch, Group
from ..rollout.orders import draw_id
from ..training import TrainReport
from ..trajectory import Row

JSON_LINES: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""How a file of records is opened. A lone surrogate, which UTF-8 cannot hold, is written as JSON's escape for it."""


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line; what JSON has no form for is its str."""
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def batch_records(batch: Batch, report: TrainReport, step: int, env: str) -> Iterator[dict[str, Any]]:
    """Every episode consumed for a step. `report.advantages` are in the order of the batch's rows. `env` = the environment of
    tasks that name none.
    """
    advantages = iter(report.advantages)
    for group in batch.groups:
        valid = {result.rollout_id: [next(advantages) for _ in result.rows] for result in group.valid}
        for result in group.results:
            trained = valid.get(result.rollout_id)
            outcome = "trained" if trained is not None else "failed"
            yield episode_record(result, step=step, outcome=outcome, advantages=trained)
    yield from group_records(batch.dropped, step, env)


def group_records(groups: Iterable[Group], step: int, env: str) -> Iterator[dict[str, Any]]:
    """Every episode of groups that were not trained; one that never came back has a line without rows."""
    for group in groups:
        back = {result.sample: result for result in group.results}
        for sample in range(group.n):
            result = back.get(sample) or _never_back(group, sample, env)
            yield episode_record(result, step=step, outcome=group.outcome)


def _never_back(group: Group, sample: int, env: str) -> EpisodeResult:
    group_id = draw_id(group.draw)
    return EpisodeResult(f"{group_id}-{sample}", group_id, group.draw, sample, group.task.id, group.task.env or env)


def episode_record(
    result: EpisodeResult,
    *,
    step: int,
    outcome: str,
    advantages: Sequence[NDArray[np.float32]] | None = None,
) -> dict[str, Any]:
    """The line of one episode. `advantages[i]` belongs to row i; without them the rows were not trained."""
    rows = [row_record(row, None if advantages is None else advantages[i]) for i, row in enumerate(result.rows)]
    return {
        "rollout_id": result.rollout_id,
        "group_id": result.group_id,
        "draw": result.draw,
        "sample": result.sample,
        "task_id": result.task_id,
        "env": result.env,
        "step": step,
        "rows": rows,
        "messages": [message_record(message) for message in result.messages],
        "tools": result.tools,
        "total_reward": result.total_reward,
        "score": result.score,
        "outcome": outcome,
        "truncated": result.truncated,
        "finish_reason": result.finish_reason,
        "turns": result.turns,
        "metrics": result.metrics,
        "error": result.error,
    }


def row_record(row: Row, advantage: NDArray[np.float32] | None) -> dict[str, Any]:
    return {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.astype(int).tolist(),
        "logprobs": exact(row.logprobs),
        "versions": row.versions.tolist(),
        "rewards": exact(row.rewards),
        "advantage": None if advantage is None else exact(advantage),
        "images": [list(slot) for slot in row.images],
    }


def exact(values: NDArray[np.float32]) -> list[float]:
    """Each as the shortest decimal that is this float32 and no other."""
    return values.astype(np.float32).astype(str).astype(np.float64).tolist()
