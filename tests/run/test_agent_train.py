"""Agents on SDKs and frameworks, in processes of their own, trained for real: Ray, vLLM on the CPU, DeepSpeed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..node_agent import node_agent
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


@dataclass
class Run:
    """What a run with all agents at once left; `no_node` = why there was no Node agent."""

    records: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    no_node: str | None

    @property
    def trained(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["outcome"] == "trained"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, no_node = tmp_path_factory.mktemp("agents"), None
    with ExitStack() as stack:
        several, _ = stack.enter_context(served(folder, "frameworks"))
        mortal, process = stack.enter_context(served(folder, "mortal"))
        urls = [mortal, *(f"{several}/{name}" for name in FRAMEWORKS)]
        (folder / "node").mkdir()
        try:
            urls.append(stack.enter_context(node_agent(folder / "node")))
        except pytest.skip.Exception as reason:
            no_node = str(reason)
        options = ["--agent", *urls, "--env", "calculator_math", "--train.steps", f"{STEPS}", "--eval.no-enable"]
        sizes = ["--train.batch-groups", f"{GROUPS}", "--rollout.n-samples", f"{SAMPLES}"]
        exact = ["--train.max-staleness", "0", "--rollout.max-new-tokens", "32", "--rollout.workers", "1"]
        records = train(folder, *options, *sizes, *exact)
        assert process.wait(10) < 0, "the mortal server has died"
    return Run(records, rollouts(folder), no_node)


def test_frameworks_side_by_side_while_one_server_dies(run: Run) -> None:
    """Every draw is trained once, on tokens that both sides agree on, whichever agent played it and whatever was lost. Each
    agent has a part in two updates at least.
    """
    assert [record["step"] for record in run.records] == [*range(1, STEPS + 1)]
    assert all(record["mismatch/max_abs"] < 1e-4 for record in run.records)
    check_nothing_is_lost(run.lines, SAMPLES)
    assert len(run.trained) == STEPS * GROUPS * SAMPLES
    assert all(line["error"] is None and line["total_reward"] is not None for line in run.trained)
    played = Counter((line["step"], name) for line in run.trained for name in line["metrics"])
    assert all(sum((step, name) in played for step in (1, 2, 3)) >= 2 for name in FRAMEWORKS), played
    assert not any("last words" in str(line["messages"]) for line in run.lines)
    assert any(message["role"] == "tool" for line in run.trained for message in line["messages"])
    several_turns = [line for line in run.trained if line["turns"] > 1 and len(line["rows"]) == 1]
    assert several_turns, "an agent that only appends has one row for all its turns"


def test_the_node_agent_beside_them(run: Run) -> None:
    if run.no_node is not None:
        pytest.skip(run.no_node)
    steps = {line["step"] for line in run.trained if not line["metrics"].keys() & set(FRAMEWORKS)}
    assert len(steps) >= 2
