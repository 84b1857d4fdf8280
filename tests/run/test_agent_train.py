"""Agents on the vendors' SDKs, in processes of their own, trained for real: Ray, vLLM on the CPU, DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENTRL = str(Path(sys.executable).with_name("agentrl"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def agent_server(folder: Path, module: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An example agent under uvicorn; its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(ROOT / "examples/agents"), f"{module}:app"]
    with (folder / f"{module}.log").open("w") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    try:
        wait_until(lambda: "running on" in (folder / f"{module}.log").read_text(), 120)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_agent_servers_of_which_one_dies(tmp_path: Path) -> None:
    """The agents use the OpenAI and the Anthropic SDK. Every draw is trained once, on tokens that both sides agree on."""
    with agent_server(tmp_path, "openai_sdk") as (one, _), agent_server(tmp_path, "anthropic_sdk") as (two, mortal):
        command = [AGENTRL, "train", "--agent", one, two, "--env", "calculator_math", "--train.steps", "3"]
        sizes = ["--train.batch-groups", "4", "--rollout.n-samples", "4", "--rollout.max-new-tokens", "48"]
        exact = ["--train.max-staleness", "0", "--eval.no-enable", "--rollout.workers", "2"]
        where = ["--run.dir", str(tmp_path), "--run.name", "run"]
        with (tmp_path / "log").open("w") as log:
            run = subprocess.Popen([*command, *sizes, *exact, *where], stdout=log, stderr=log, env=dict(os.environ))
        metrics = tmp_path / "run" / "metrics.jsonl"
        try:
            wait_until(lambda: run.poll() is not None or (metrics.is_file() and metrics.stat().st_size), 300)
            mortal.send_signal(signal.SIGKILL)
            assert run.wait(240) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            run.kill()
    records = [json.loads(line) for line in metrics.open()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["mismatch/max_abs"] < 1e-4 for record in records)
    lines = [json.loads(line) for file in (tmp_path / "run" / "rollouts").iterdir() for line in file.open()]
    trained = [line for line in lines if line["outcome"] == "trained"]
    assert len({(line["draw"], line["sample"]) for line in trained}) == len(trained) == 3 * 16
    assert all(line["error"] is None and line["total_reward"] is not None for line in trained)
    assert any(message["role"] == "tool" for line in trained for message in line["messages"])
    several = [row for line in trained for row in line["rows"] if line["turns"] > 1 and len(line["rows"]) == 1]
    assert several, "an agent that only appends has one row for all its turns"
