"""Weights & Biases without a server: what is logged can be read back from the run folder."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import ConfigError
from agentrl.report.progress import make_reporter
from agentrl.report.weights_and_biases import WandbRun

wandb = pytest.importorskip("wandb")


def logged(folder: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """(points, run ids) of every offline run below a folder."""
    from wandb.proto import wandb_internal_pb2

    points, ids = [], set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        records = []
        # Another process writes it, and may still be at it when the run is finished.
        while not any(record.WhichOneof("record_type") == "exit" for record in records):
            time.sleep(0.05)
            records = [wandb_internal_pb2.Record.FromString(data) for data in stored(file.read_bytes())]
        for record in records:
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                points.append({key: json.loads(value) for key, value in items.items() if not key.startswith("_")})
    return points, ids


def stored(content: bytes) -> Iterator[bytes]:
    """The records of a file of one block: after a header of 7 bytes each has a checksum, its length, its type, its bytes."""
    place = 7
    while place + 7 < len(content) < 32768:
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        yield content[place + 7 : place + 7 + length]
        place += 7 + length


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_number_is_logged_at_its_step_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    where = WandbRun(tmp_path / "run", "agentrl", group="tests", config={"run": {"seed": 1}})
    with make_reporter("none", 9, wandb=where) as reporter:
        reporter.step({"step": 4, "time": 1.0, "reward/mean": 0.5, "text": "x"})
        reporter.step({"step": 5, "time": 2.0, "reward/mean": 0.75})
        reporter.evaluation({"step": 4, "version": 4, "eval/score/mean": 1.0})
    time.sleep(1.1)  # the folders' names tell runs apart by the second
    with make_reporter("none", 9, wandb=where) as reporter:
        reporter.step({"step": 5, "reward/mean": 0.8})
    points, ids = logged(tmp_path / "run")
    assert points == [
        {"step": 4, "reward/mean": 0.5},
        {"step": 5, "reward/mean": 0.75},
        {"step": 4, "version": 4, "eval/score/mean": 1.0},
        {"step": 5, "reward/mean": 0.8},
    ]
    assert len(ids) == 1, "a resumed run goes on in the same run"


def test_without_its_package_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        make_reporter("none", 9, wandb=WandbRun(tmp_path, "agentrl"))
