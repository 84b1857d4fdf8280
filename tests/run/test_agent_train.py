"""Agents on SDKs and frameworks, in processes of their own, trained for real: Ray, vLLM on the CPU, DeepSpeed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ..node_agent import missing, node_agent
from .agent_servers import FRAMEWORKS
from .test_real_train import check_nothing_is_lost, rollouts, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, GROUPS, SAMPLES = 3, 4, 4


@contextmanager
def served(folder: Path, app: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An app of agent_servers.py under uvicorn; its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"{app}.log"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), f"agent_servers:{app}"]
    with log.open("w") as sink:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + 120
        while "running on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_frameworks_side_by_side_while_one_server_dies(tmp_path: Path) -> None:
    """Every draw is trained once, on tokens that both sides agree on, whichever agent played it and whatever was lost."""
    with ExitStack() as stack:
        several, _ = stack.enter_context(served(tmp_path, "frameworks"))
        mortal, process = stack.enter_context(served(tmp_path, "mortal"))
        urls = [mortal, *(f"{several}/{name}" for name in FRAMEWORKS)]
        if missing() is None:
            (tmp_path / "node").mkdir()
            urls.append(stack.enter_context(node_agent(tmp_path / "node")))
        options = ["--agent", *urls, "--env", "calculator_math", "--train.steps", f"{STEPS}", "--eval.no-enable"]
        sizes = ["--train.batch-groups", f"{GROUPS}", "--rollout.n-samples", f"{SAMPLES}"]
        exact = ["--train.max-staleness", "0", "--rollout.max-new-tokens", "32", "--rollout.workers", "1"]
        records = train(tmp_path, *options, *sizes, *exact)
        assert process.wait(10) < 0, "the mortal server has died"
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    assert all(record["mismatch/max_abs"] < 1e-4 for record in records)
    lines = rollouts(tmp_path)
    check_nothing_is_lost(lines, SAMPLES)
    trained = [line for line in lines if line["outcome"] == "trained"]
    assert len(trained) == STEPS * GROUPS * SAMPLES
    assert all(line["error"] is None and line["total_reward"] is not None for line in trained)
    played = Counter((line["step"], name) for line in trained for name in line["metrics"])
    assert all(sum((step, name) in played for step in (1, 2, 3)) >= 2 for name in FRAMEWORKS), played
    assert any(name == "anthropic_sdk" for _, name in played)
    assert not any("last words" in str(line["messages"]) for line in lines)
    assert any(message["role"] == "tool" for line in trained for message in line["messages"])
    several_turns = [line for line in trained if line["turns"] > 1 and len(line["rows"]) == 1]
    assert several_turns, "an agent that only appends has one row for all its turns"
