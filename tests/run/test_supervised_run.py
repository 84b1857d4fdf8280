"""`agentrl sft`, `rm` and `dpo` for real: Ray, DeepSpeed, two ranks; killed, interrupted, resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

AGENTRL = str(Path(sys.executable).with_name("agentrl"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PASSES = ["--train.batch", "8", "--train.epochs", "5", "--ckpt.every", "2", "--optim.lr", "2e-3"]


def sums(count: int, start: int = 0) -> list[tuple[str, int]]:
    return [(f"{(7 * i) % 10}+{(3 * i) % 10}=?", (7 * i) % 10 + (3 * i) % 10) for i in range(start, start + count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a model, and a place for runs."""
    from agentrl.trainers.tiny import make_tiny

    place = tmp_path_factory.mktemp("supervised")
    make_tiny("tiny-text", place / "model", max_steps=0)
    for name, rows in (("train", sums(48)), ("test", sums(16, 100))):
        chats = [{"prompt": q, "answer": str(a)} for q, a in rows]
        pairs = [{"prompt": q, "chosen": str(a), "rejected": str(a + 1)} for q, a in rows]
        for kind, lines in (("chat", chats), ("pairs", pairs)):
            (place / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def command(folder: Path, kind: str, name: str, *options: str, model: str = "model") -> list[str]:
    data = "chat" if kind == "sft" else "pairs"
    columns = ["--data.input-key", "prompt", "--data.answer-key", "answer"] if kind == "sft" else []
    paths = ["--data.path", f"{folder}/{data}_train.jsonl", "--data.test-path", f"{folder}/{data}_test.jsonl"]
    run = ["--run.dir", str(folder), "--run.name", name, "--model", str(folder / model)]
    return [AGENTRL, kind, *run, *paths, *columns, *options]


def finish(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """What the uninterrupted sft run said."""
    return finish(command(folder, "sft", "whole", *PASSES))


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def interrupted(argv: list[str], number: int, due: Callable[[], bool]) -> tuple[int, str]:
    """Start, send the signal as soon as `due` says so; the exit code and what was said. No process stays."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not due() and process.poll() is None:
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said = process.communicate(timeout=120)[0]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    return process.returncode, said


def test_a_killed_run_goes_on_to_what_the_whole_run_gives(folder: Path, whole: str) -> None:
    from safetensors.torch import load_file

    records = metrics(folder, "whole")
    assert [record["step"] for record in records] == list(range(31))
    evaluated = [record["step"] for record in records if "eval/loss" in record]
    assert evaluated == [0, 6, 12, 18, 24, 30] and "held-out loss" in whole
    assert records[-1]["eval/loss"] < records[0]["eval/loss"] - 1
    latest = folder / "killed" / "checkpoints" / "latest"
    code, _ = interrupted(command(folder, "sft", "killed", *PASSES), signal.SIGKILL, latest.is_file)
    assert code == -signal.SIGKILL and len(metrics(folder, "killed")) < 31
    finish([AGENTRL, "sft", "--resume", "latest", "--run.dir", str(folder), "--run.name", "killed"])
    again = metrics(folder, "killed")
    ours = ("time", "time/step", "throughput/tokens")
    assert [{k: v for k, v in record.items() if k not in ours} for record in again] == [
        {k: v for k, v in record.items() if k not in ours} for record in records
    ]
    one, other = (load_file(folder / name / "final" / "model.safetensors") for name in ("whole", "killed"))
    assert all((one[name] - other[name]).abs().max() < 1e-6 for name in one)


def test_two_ranks_prefer_what_they_are_shown_and_an_interrupt_leaves_a_checkpoint(folder: Path, whole: str) -> None:
    """DPO on what the sft run gave, sharded; its reference is computed once and serves the resumed run."""
    ranks = ["--parallel.ranks", "2", "--parallel.zero-stage", "2", "--train.batch", "8", "--optim.lr", "1e-3"]
    argv = command(folder, "dpo", "dpo", *ranks, "--train.epochs", "40", "--dpo.nll-coef", "0.1", model="whole/final")
    file = folder / "dpo" / "metrics.jsonl"
    code, said = interrupted(argv, signal.SIGINT, lambda: file.is_file() and len(file.read_text().splitlines()) > 3)
    assert code == 130 and "agentrl dpo --resume latest" in said
    references = {path: path.stat().st_mtime_ns for path in (folder / "dpo" / "reference").iterdir()}
    assert len(references) == 2
    stopped = metrics(folder, "dpo")[-1]["step"]
    more = ["--train.epochs", str(stopped // 6 + 2)]
    finish([AGENTRL, "dpo", "--resume", "latest", "--run.dir", str(folder), "--run.name", "dpo", *more])
    records = metrics(folder, "dpo")
    assert [record["step"] for record in records] == list(range(len(records))) and records[-1]["step"] > stopped
    assert records[-1]["eval/margin"] > 0.1 and records[-1]["eval/loss"] < records[0]["eval/loss"]
    assert {path: path.stat().st_mtime_ns for path in references} == references
