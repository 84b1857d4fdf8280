"""Recorded episodes back as values: the inverse of `record.py`, exact in everything that is trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..env import Task
from ..errors import DataError
from ..rollout.episode import EpisodeResult
from ..rollout.group import Group
from ..rollout.ledger import HeldRollouts
from ..trajectory import Row
from .record import JSON_LINES, episode_record, json_line

HELD = "rollouts.jsonl"
OF_ROWS = ("rollout_id", "group_id", "task_id", "env", "total_reward", "score", "truncated", "finish_reason")
"""What an episode's record holds once, and each of its rows has."""


def read_episode(record: Mapping[str, Any]) -> EpisodeResult:
    """The episode of one line. Records may lack the tools and the number of turns."""
    return EpisodeResult(
        rows=[_read_row(row, record) for row in record["rows"]],
        tools=record.get("tools", []),
        turns=record.get("turns", 0),
        **{key: record[key] for key in (*OF_ROWS, "draw", "sample", "messages", "metrics", "error")},
    )


def _read_row(row: Mapping[str, Any], record: Mapping[str, Any]) -> Row:
    return Row(
        token_ids=np.array(row["token_ids"], np.int32),
        loss_mask=np.array(row["loss_mask"], np.bool_),
        logprobs=np.array(row["logprobs"], np.float32),
        versions=np.array(row["versions"], np.int32),
        rewards=np.array(row["rewards"], np.float32),
        images=[(sha, start, count) for sha, start, count in row["images"]],
        **{key: record[key] for key in OF_ROWS},
    )


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one a line. Raises DataError with the number of a line that is none."""
    with path.open(**JSON_LINES) as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not a record: {error}") from error


def write_held(folder: Path, held: HeldRollouts) -> None:
    """The groups a checkpoint keeps, one episode a line."""
    with (folder / HELD).open("w", **JSON_LINES) as file:
        for group in held.groups:
            for result in group.results:
                record = episode_record(result, step=0, outcome=group.outcome)
                file.write(json_line({**record, "n": group.n, "version": group.version}))


def read_held(folder: Path, next_draw: int, reissue: Iterable[int]) -> HeldRollouts:
    """What `write_held` wrote. The tasks of the groups have only their ids: nothing of them is played again. Raises DataError
    where episodes of theirs are missing.
    """
    if not (folder / HELD).is_file():
        raise DataError(f"{folder} is damaged: {HELD}, the rollouts that were not trained yet, is missing.")
    groups: list[Group] = []
    for record in read_lines(folder / HELD):
        if not groups or groups[-1].draw != record["draw"] or groups[-1].finished:
            task = Task(record["task_id"])
            groups.append(Group(record["draw"], task, record["n"], record["version"], outcome=record["outcome"]))
        groups[-1].results.append(read_episode(record))
    for group in groups:
        if not group.finished:
            raise DataError(
                f"{folder / HELD} is damaged: draw {group.draw} has {len(group.results)} of {group.n} episodes."
            )
    return HeldRollouts(next_draw, tuple(reissue), tuple(groups))
