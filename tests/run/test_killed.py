"""kill -9 in every step, in whatever it does, and resume: what comes out is what the uninterrupted run gives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .killed_runs import GROUPS, MODES, STEPS

KEYS = ("step", "version", "policy/lr", "policy/loss", "policy/grad_norm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ..engines import tiny

    folder = tmp_path_factory.mktemp("runs")
    tiny.text_model(folder / "model", tied=True)
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), str(folder / "model"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def episodes(run: Path) -> list[dict[str, Any]]:
    return [record for path in sorted((run / "rollouts").glob("*.jsonl")) for record in lines(path)]


def trained(run: Path) -> list[tuple[Any, ...]]:
    """Everything of every trained episode that decides an update, versions left out."""
    found = []
    for record in episodes(run):
        if record["outcome"] == "trained":
            rows = [
                (r["token_ids"], r["loss_mask"], r["logprobs"], r["rewards"], r["advantage"]) for r in record["rows"]
            ]
            found.append((record["step"], record["rollout_id"], record["task_id"], record["total_reward"], rows))
    return sorted(found, key=lambda episode: episode[:2])


def weights(run: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run / "final" / "model.safetensors")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_in_every_step_equals_the_uninterrupted_one(runs: Path, mode: str) -> None:
    whole, killed = runs / mode / "whole", runs / mode / "killed"
    assert trained(whole) == trained(killed) and len(trained(whole)) >= STEPS * GROUPS
    one, other = weights(whole), weights(killed)
    assert max(np.abs(one[name] - other[name]).max() for name in one) < 1e-6
    first, second = (
        [{key: r[key] for key in KEYS} for r in lines(run / "metrics.jsonl") if r["step"]] for run in (whole, killed)
    )
    assert [r["step"] for r in first] == list(range(1, STEPS + 1))
    for one_step, other_step in zip(first, second, strict=True):
        assert other_step == pytest.approx(one_step, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_no_draw_is_lost_or_trained_twice(runs: Path, mode: str) -> None:
    for run in (runs / mode / "whole", runs / mode / "killed"):
        seen = Counter((record["draw"], record["sample"]) for record in episodes(run))
        assert set(seen.values()) == {1}
        assert {draw for draw, _ in seen} == set(range(len(seen) // 3))
        outcomes = Counter(record["outcome"] for record in episodes(run))
        assert outcomes["trained"] == STEPS * GROUPS * 3
        assert set(outcomes) <= {"trained", "cancelled"} | ({"filtered"} if mode == "async" else set())
        bound = MODES[mode]["train"]["max_staleness"]
        version = {record["step"]: record["version"] - 1 for record in lines(run / "metrics.jsonl")}
        for record in episodes(run):
            if record["outcome"] == "trained":
                sampled = [v for r in record["rows"] for v, m in zip(r["versions"], r["loss_mask"], strict=True) if m]
                assert 0 <= version[record["step"]] - min(sampled) <= bound


def test_evaluation_changes_nothing_and_is_of_one_version(runs: Path) -> None:
    evaluated, other = runs / "evaluated" / "whole", runs / "partial" / "whole"
    one, two = weights(evaluated), weights(other)
    assert all(np.array_equal(one[name], two[name]) for name in one)
    records = lines(evaluated / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(STEPS + 1))
    assert [(r["eval/version"], r["eval/excluded"]) for r in records] == [(r["version"], 0.0) for r in records]
    again = lines(runs / "evaluated" / "killed" / "metrics.jsonl")
    measured = [{k: v for k, v in r.items() if k.startswith("eval/") and k != "eval/version"} for r in records]
    assert [{k: r[k] for k in m} for r, m in zip(again, measured, strict=True)] == measured


def test_a_replay_of_the_records_trains_the_same_weights(runs: Path) -> None:
    one, two = weights(runs / "partial" / "whole"), weights(runs / "partial" / "replayed")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert trained(runs / "partial" / "whole") == trained(runs / "partial" / "replayed")


def test_what_a_resume_leaves_behind_is_kept_aside(runs: Path) -> None:
    killed = runs / "partial" / "killed"
    assert sorted(path.name for path in (killed / "checkpoints").glob("step_*")) == ["step_000003", "step_000004"]
    assert (killed / "checkpoints" / "latest").read_text() == "step_000004"
