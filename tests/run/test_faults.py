"""Processes of a run that die or stop answering: it goes on with others in their place, or stops and says why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .test_ending import AGENTRL, processes, wait_until
from .test_real_train import check_nothing_is_lost, check_versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LETTERS = Path(__file__).with_name("letters.py")
SIZES = ["--train.batch-groups", "2", "--rollout.n-samples", "2", "--eval.no-enable", "--ckpt.every", "1"]
TIMES = ["--rollout.episode-timeout-s", "12", "--rollout.call-timeout-s", "6", "--watchdog.warn-after", "4"]


def policy(folder: Path) -> list[str]:
    """The options for a random tiny policy on `Letters`."""
    from ..engines import tiny

    tiny.text_model(folder / "model", tied=False)
    lengths = ["--rollout.max-len", "512", "--rollout.max-new-tokens", "16"]
    return ["--env", f"{LETTERS}:Letters", "--model", str(folder / "model"), *lengths]


class Running:
    """One `agentrl train` in a process of its own; what it started carries its mark."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.log = folder / "log"
        command = [AGENTRL, "train", "--run.dir", str(folder), "--run.name", "run", *options]
        with self.log.open("a") as log:
            environment = {**os.environ, "AGENTRL_TEST_MARK": self.mark}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def records(self) -> list[dict[str, Any]]:
        metrics = self.folder / "run" / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
        return [json.loads(line) for line in lines]

    def steps(self) -> list[int]:
        return [record["step"] for record in self.records()]

    def actor(self, kind: str) -> int:
        """The process of a Ray actor, by its class."""
        found = [
            pid
            for pid in processes(self.mark, self.folder)
            if f"ray::{kind}" in " ".join(psutil.Process(pid).cmdline())
        ]
        assert len(found) == 1, found
        return found[0]

    def wait(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        ended = self.process.poll
        assert wait_until(lambda: ended() is not None or condition(), seconds), self.log.read_text()[-5000:]
        assert ended() is None, self.log.read_text()[-5000:]

    def goes_on(self, steps: int = 2) -> None:
        """So many more steps are trained."""
        aim = len(self.steps()) + steps
        self.wait(lambda: len(self.steps()) >= aim)

    def end(self) -> None:
        for pid in processes(self.mark, self.folder):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def test_what_dies_or_hangs_is_replaced_and_a_dead_trainer_ends_the_run(tmp_path: Path) -> None:
    """One run, five faults, then a resume to the end; every draw is accounted for."""
    scripted = ["--engine", "scripted", "--engine.script", f"{LETTERS}:reply"]
    options = [*policy(tmp_path), *scripted, *SIZES, *TIMES, "--optim.name", "sgd", "--rollout.silence-timeout-s", "6"]
    run = Running(tmp_path, *options, "--train.steps", "1000")
    try:
        run.wait(lambda: len(run.steps()) >= 2, 300)
        for kind, number in (
            ("ScriptedActor", signal.SIGKILL),
            ("RolloutWorker", signal.SIGKILL),
            ("ScriptedActor", signal.SIGSTOP),
            ("RolloutWorker", signal.SIGSTOP),
        ):
            os.kill(lost := run.actor(kind), number)
            run.wait(lambda lost=lost: not psutil.pid_exists(lost) or dead(lost))
            run.goes_on()
        text = run.log.read_text()
        assert len(re.findall("engine 0 is replaced", text)) == 2
        assert re.search("rollout worker 0 died: replaced", text)
        assert re.search(r"rollout worker 0 has answered nothing for \d+ s: replaced", text)
        os.kill(run.actor("RankProcess"), signal.SIGKILL)
        assert run.process.wait(120) == 1
    finally:
        run.end()
    said = run.log.read_text()
    last = run.steps()[-1]
    assert re.search(rf"agentrl: the run stopped after step {last}: trainer rank 0 .*died", said)
    assert re.search(r"--resume latest goes on from step_\d{6}", said)
    again = Running(tmp_path, *options, "--train.steps", str(last + 2), "--resume", "latest")
    try:
        assert again.process.wait(300) == 0, again.log.read_text()[-5000:]
    finally:
        again.end()
    assert again.steps() == list(range(1, last + 3))
    paths = sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.open()]
    check_nothing_is_lost(lines, 2)
    check_versions(lines, 1, again.records())
    assert all(line["error"] is None for line in lines if line["outcome"] == "trained")


def dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_vllm_is_replaced_and_a_killed_run_resumed_with_the_current_weights(tmp_path: Path) -> None:
    """Killed, or a core that stands still; what it had started ends with it. Trained tokens have the trainer's
    log-probabilities: neither an engine that replaced another, nor one of a run that goes on after kill -9, serves the
    weights it started with.
    """
    synchronous = ["--train.max-staleness", "0", "--optim.lr", "0.01"]
    bounds = ["--engine.silence-timeout-s", "15", "--engine.update-timeout-s", "60"]  # it may be stopped in an update
    options = [*policy(tmp_path), *SIZES, *synchronous, *bounds]
    run = Running(tmp_path, *options, "--train.steps", "100")
    try:
        run.wait(lambda: len(run.steps()) >= 3, 400)
        for replaced, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            actor = run.actor("VLLMActor")
            (core,) = [c.pid for c in psutil.Process(actor).children(recursive=True) if "EngineCore" in c.name()]
            os.kill(actor if number == signal.SIGKILL else core, number)
            run.wait(lambda n=replaced: run.log.read_text().count("engine 0 is replaced") == n, 300)
            assert wait_until(lambda lost=(actor, core): all(map(dead, lost)), 20), "its core holds memory"
            run.goes_on()
        os.kill(run.process.pid, signal.SIGKILL)
    finally:
        run.end()
    again = Running(tmp_path, *options, "--train.steps", str(run.steps()[-1] + 2), "--resume", "latest")
    try:
        assert again.process.wait(400) == 0, again.log.read_text()[-5000:]
    finally:
        again.end()
    assert again.steps() == list(range(1, again.steps()[-1] + 1))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert all(record["mismatch/max_abs"] < 1e-3 for record in records if "mismatch/max_abs" in record)
    assert all(record["version"] == record["step"] for record in records if record.get("policy/grad_norm"))
