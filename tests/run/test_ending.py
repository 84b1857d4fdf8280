"""However a run ends, none of its processes is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

AGENTRL = str(Path(sys.executable).with_name("agentrl"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OPTIONS = ["train", "--env", "screenshot_math", "--train.steps", "200", "--train.batch-groups", "2", "--eval.no-enable"]
SCRIPT = "from agentrl import Reply\ndef reply(request):\n    return Reply([15, 503], [-0.5, -0.5], delay_s=0.05)\n"


def processes(mark: str, folder: Path) -> list[int]:
    """Living processes that were started with the mark in their environment, or that run in the folder: those that change
    their title overwrite what can be read of their environment.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.environ().get("AGENTRL_TEST_MARK") == mark or process.cwd() == str(folder)
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds: float) -> bool:
    """Whether the condition came true in time; it is asked four times a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.25)
    return True


@pytest.mark.parametrize(
    ("number", "send", "engine"),
    [
        (signal.SIGINT, os.kill, "vllm"),
        (signal.SIGTERM, os.kill, "scripted"),
        (signal.SIGTERM, os.killpg, "scripted"),
        (signal.SIGKILL, os.kill, "vllm"),
    ],
    ids=["ctrl-c", "sigterm", "sigterm to all", "driver killed"],
)
def test_nothing_is_left(tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None], engine: str) -> None:
    """To all: as `timeout` and batch systems do; Ray's server ends of it too."""
    mark = uuid.uuid4().hex
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    own = ["--engine", "scripted", "--engine.script", f"{script}:reply"] if engine == "scripted" else []
    command = [AGENTRL, *OPTIONS, "--run.dir", str(tmp_path), "--run.name", "run", *own]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            command,
            env={**os.environ, "AGENTRL_TEST_MARK": mark},
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            start_new_session=True,
        )
    metrics = tmp_path / "run" / "metrics.jsonl"
    reader = None
    try:
        assert wait_until(lambda: run.poll() is not None or (metrics.is_file() and metrics.stat().st_size), 240)
        assert run.poll() is None, (tmp_path / "log").read_text()[-3000:]
        reader = subprocess.Popen(["tail", "-f", session_log(run.pid)], stdout=subprocess.DEVNULL)
        send(run.pid, number)
        assert wait_until(lambda: run.poll() is not None and not processes(mark, tmp_path), 30), (
            tmp_path / "log"
        ).read_text()
        assert reader.poll() is None, "who reads a log of the cluster is no process of the run"
    finally:
        if reader is not None:
            reader.kill()
            reader.wait()
        for pid in processes(mark, tmp_path):
            os.kill(pid, signal.SIGKILL)
    if number is not signal.SIGKILL:
        check_orderly(tmp_path / "run", run.returncode)


def session_log(driver: int) -> str:
    """A log of the Ray session that a driver started."""
    files = [Path(file.path) for file in psutil.Process(driver).open_files()]
    return next(str(file) for file in files if file.name.startswith("python-core-driver"))


def check_orderly(folder: Path, code: int) -> None:
    """An interrupted run exits with 130, its last word is how it goes on, and it leaves a checkpoint of its last whole step."""
    assert code == 130
    assert "Go on with: agentrl train --resume latest" in (folder.parent / "log").read_text().splitlines()[-1]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    state = json.loads((folder / "checkpoints" / f"step_{steps[-1]:06d}" / "run.json").read_text())
    assert state["step"] == steps[-1] == len(steps)
