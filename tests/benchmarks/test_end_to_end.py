"""The parts of the comparison of whole runs: what both sides are given, and how it is measured."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import Action
from agentrl.engines.hermes import tool_call

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CHILD = """
import subprocess, sys, time
if sys.argv[1:]:
    while time.process_time() < 0.4: pass
    time.sleep(0.4)
else:
    subprocess.run([sys.executable, __file__, "busy"], check=True)
"""


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_no_script_hides_a_module_of_python() -> None:
    """A script's folder comes first on its path."""
    names = {path.stem for path in BENCHMARKS.iterdir()}
    assert "end_to_end" in names and not names & (sys.stdlib_module_names - {"async"})


def test_the_tails_are_as_long_as_they_are_said_to_be() -> None:
    from end_to_end_parts.tasks import long_tailed

    rng = random.Random(0)
    drawn = [long_tailed(rng, 0.5, 8.0) for _ in range(20_000)]
    median, last = np.percentile(drawn, [50, 99])
    assert median == pytest.approx(0.5, rel=0.05) and last / median == pytest.approx(8.0, rel=0.1)


async def test_what_is_shown_solves_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstrated turns, played in the environment, get the tool's demonstrated answers and the whole reward."""
    from end_to_end_parts import tasks

    monkeypatch.setattr(tasks, "MEDIAN_WAIT_S", 0.0)
    counted, summed = tasks.demonstrations(2)
    last = counted["messages"][-1]["content"]
    assert tasks.counted(last, last.split()[-1]) == 1.0 > tasks.counted(f"{last} 99", last.split()[-1]) > 0.0
    row = tasks.sums(1, -1)[0]
    task = tasks.Task("0", row["prompt"][0]["content"], row["label"])
    env = tasks.Sums()
    env.reset(seed=0, options={"task": task})
    rewards = []
    for turn, answer in zip(summed["messages"][1::2], [*summed["messages"][2::2], None], strict=True):
        observation, reward, *_ = await env.step(action_of(turn))
        rewards.append(reward)
        if answer is not None:
            assert observation[0]["content"] == answer["content"]
    assert rewards == [None, None, 1.0]
    assert [m["role"] for m in env.messages] == [m["role"] for m in summed["messages"]]


def action_of(message: dict[str, Any]) -> Action:
    calls = [tool_call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return Action(message["content"], tool_calls=calls)


def test_calls_that_queue_are_told_from_calls_of_another_round() -> None:
    from end_to_end_parts.tasks import Waits

    waits = Waits()
    waits.made = [(0.0, 1.0), (1.0, 3.0), (4.01, 2.0), (9.0, 5.0), (14.0, 1.0)]
    assert waits.serial_excess() == pytest.approx((6.0 - 3.0) + (6.0 - 5.0))


def test_the_meter_sees_what_the_children_of_a_program_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from end_to_end_parts import meter

    monkeypatch.setattr(meter, "INTERVAL_S", 0.05)
    (tmp_path / "child.py").write_text(CHILD)
    measured, began = meter.Meter(), time.time()
    measured.run([sys.executable, str(tmp_path / "child.py")])
    assert 0.35 <= measured.cpu_seconds(began, time.time()) < 2.0
    assert measured.cpu_seconds(began, began) == 0.0


def test_ratios_are_theirs_over_ours_and_count_tokens() -> None:
    from end_to_end import JOBS, ratios, summary
    from end_to_end_parts.ours import Found

    job = JOBS["counting"]
    trl = summary(Found(0.0, 100.0, 5000, [], [], 9.0, {"serial_excess": 20.0}), 150.0, job)
    ours = summary(Found(10.0, 50.0, 4000, [], [], 30.0), 75.0, job)
    (found,) = ratios({"TRL": trl, "agentrl": ours}).values()
    expected = {
        "wall": 2.5,
        "cpu": 2.0,
        "tokens": 0.8,
        "tokens_per_s": 2.0,
        "tokens_per_cpu_s": 1.6,
        "tools_at_once": 2.0,
    }
    assert found == pytest.approx(expected)
