"""Runs at once on one machine. Each has its processes, its records and its end for itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from .test_ending import AGENTRL, processes, wait_until
from .test_faults import LETTERS, SIZES, Running, policy
from .test_real_train import check_nothing_is_lost, check_versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTED = """

def noted(request):
    import os
    from pathlib import Path

    with Path(__file__).with_name("served").open("a") as file:
        file.write(f"{os.getpid()} {request.episode_id}\\n")
    return uneven_reply(request)
"""


def test_runs_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two begin together and one of them is killed, a third ends first; the one that stays, of two engines and two workers,
    goes on, tells its status and ends when it is told to.
    """
    options = policy(tmp_path)
    folders = [tmp_path / name for name in ("large", "short", "killed")]
    for folder in folders:
        folder.mkdir()
        (folder / "script.py").write_text(LETTERS.read_text() + NOTED)
    common = [*options, *SIZES, "--engine", "scripted", "--optim.name", "sgd"]
    two = ["--engine.count", "2", "--rollout.workers", "2", "--train.max-staleness", "2"]
    many = ["--train.steps", "1000"]

    def begin(folder: Path, *more: str) -> Running:
        return Running(folder, *common, "--engine.script", f"{folder / 'script.py'}:noted", *more)

    running = [begin(folders[0], *two, *many), begin(folders[2], *many)]
    large, killed = running
    try:
        killed.wait(lambda: len(killed.steps()) >= 1, 400)
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        running.append(short := begin(folders[1], "--train.steps", "2"))
        assert short.process.wait(400) == 0, short.log.read_text()[-5000:]
        for run in (short, killed):
            assert wait_until(lambda run=run: not processes(run.mark, run.folder), 60)
        large.goes_on(3)
        check_status(large)
        large.process.send_signal(signal.SIGINT)
        assert large.process.wait(100) == 130
    finally:
        for run in running:
            run.end()
    assert short.steps() == [1, 2]
    assert "replaced" not in large.log.read_text() and "died" not in large.log.read_text()
    check_books(large)
    assert "the run ended" in status(large.folder / "run")


def check_books(run: Running) -> None:
    """Nothing is lost, and a group is served by one engine, of which there were two, and both were busy."""
    paths = sorted((run.folder / "run" / "rollouts").glob("*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.open()]
    check_nothing_is_lost(lines, 2)
    check_versions(lines, 2, run.records())
    engines, served = defaultdict(set), (run.folder / "served").read_text().split("\n")[:-1]
    for engine, episode in (line.split() for line in served):
        engines[episode.rpartition("-")[0]].add(engine)
    assert all(len(of_group) == 1 for of_group in engines.values())
    assert len(set.union(*engines.values())) == 2
    assert {line["group_id"] for line in lines if line["outcome"] == "trained"} <= engines.keys()


def status(folder: Path) -> str:
    done = subprocess.run([AGENTRL, "status", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_status(run: Running) -> None:
    """The command shows the step, and every group that holds a place with what its episodes wait for."""
    before, said = run.steps()[-1], ""

    def is_told() -> bool:
        nonlocal said
        said = status(run.folder / "run")
        told = re.match(r"step (\d+), version \d+, written \d+ s ago\n", said)
        return told is not None and before <= int(told.group(1)) <= run.steps()[-1] + 1

    assert wait_until(is_told, 60), said
    assert "no process" not in said
    groups = re.findall(r"^group (\d{6}) \(\d/2 episodes\) for \d+ s: (.*)$", said, re.M)
    assert re.search(rf"; {len(groups)} groups hold places$", said, re.M) and 1 <= len(groups) <= 6
    stages = (
        r"waits for the engine \(\d{6}-[01]-\d\)|waits for a |in the environment|finished, waits for its batch|in training|"
        r"played by a worker"
    )
    assert all(re.search(stages, doing) for _, doing in groups), said
