"""Numbers that are not finite: what they cost is said, and their rows are kept for a person to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ..errors import AgentRLError
from ..report.record import JSON_LINES, json_line, row_record
from ..trajectory import Row

logger = logging.getLogger(__name__)


class DivergenceError(AgentRLError):
    """More steps with numbers that are not finite than `train.max_bad_steps` allows."""


def report_bad_rows(what: str, fault: str, rows: Sequence[Row], path: Path | None) -> str:
    """Say what a number that is not finite has cost, and add the rows to the file at `path`; None = another rank does.
    Returns the message.
    """
    names = ", ".join(dict.fromkeys(row.rollout_id for row in rows[:3])) + (", …" if len(rows) > 3 else "")
    message = f"{what}: {fault}. The rows, of rollouts {names}, are in bad_rows/ of the run's folder"
    if path is not None:
        _save(path, what, rows)
        logger.warning("%s", message)
    return message


def _save(path: Path, what: str, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", **JSON_LINES) as file:
        for row in rows:
            about = {"what": what, "rollout_id": row.rollout_id, "group_id": row.group_id, "task_id": row.task_id}
            file.write(json_line({**about, "total_reward": row.total_reward, **row_record(row, None)}))
