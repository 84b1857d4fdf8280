"""Which data are recorded episodes, and which options are then of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import SftConfig, SupervisedConfig
from ..errors import ConfigError
from ..report.read_record import read_lines
from ..report.record import JSON_LINES

OF_BOTH = ("path", "test_path", "max_samples")
"""Options of data that are for rows and for recorded episodes."""


def recorded_files(path: str) -> list[Path]:
    """The files of a path that would hold trajectories."""
    place = Path(path)
    return sorted(place.glob("step_*.jsonl")) if place.is_dir() else [place]


def is_recorded(path: str) -> bool:
    """Whether a path holds trajectories: a folder with step_*.jsonl, or a file whose first line is one."""
    files = recorded_files(path)
    if not files or files[0].suffix != ".jsonl" or not files[0].is_file():
        return False
    with files[0].open(**JSON_LINES) as file:
        line = file.readline()
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and {"rollout_id", "rows", "messages"} <= record.keys()


def show_pictures(config: SupervisedConfig) -> bool:
    """Whether the training data are recorded episodes with pictures: those of the first that was played to its end tell."""
    files = [file for path in config.data.path if is_recorded(path) for file in recorded_files(path)]
    records = (record for file in files for record in read_lines(file) if isinstance(record, dict))
    rows: list[Any] = next((record["rows"] for record in records if record.get("rows")), [])
    return isinstance(config, SftConfig) and any(isinstance(row, dict) and row.get("images") for row in rows)


def are_recorded(config: SftConfig, *, held_out: bool = False) -> bool:
    """Whether the training data, or the held-out data, are recorded episodes. Raises ConfigError where some are and others
    are not, and for options that nothing reads.
    """
    train, test = _all_recorded(config.data.path, "path"), _all_recorded(config.data.test_path, "test-path")
    rows = not train or (bool(config.data.test_path) and not test)
    unread = {
        "--sft.min-score": config.sft.min_score is not None and not (train or test),
        "--sft.pretrain": config.sft.pretrain and not rows,
        "--data.probs": bool(config.data.probs) and train,
    }
    for flag in (flag for flag, holds in unread.items() if holds):
        what = "without recorded episodes in --data.path" if flag == "--sft.min-score" else "with recorded episodes"
        raise ConfigError(f"{flag} is not used {what}.")
    of_rows = [name for name in config.data.changed() if name not in OF_BOTH]
    if of_rows and not rows:
        raise ConfigError(
            f"--data.{of_rows[0].replace('_', '-')} is not used with recorded episodes, which have no columns."
        )
    return test if held_out else train


def _all_recorded(paths: list[str], flag: str) -> bool:
    found = {path: is_recorded(path) for path in paths}
    if len(set(found.values())) > 1:
        one, other = (next(path for path, is_one in found.items() if is_one is wanted) for wanted in (True, False))
        raise ConfigError(
            f"--data.{flag}: {one} holds recorded episodes and {other} does not: train on the one, then go on with "
            "--model runs/NAME/final on the other."
        )
    return any(found.values())
