"""A run under fire: for some minutes engines and rollout workers are killed or stopped at random, then the books are checked.

    python benchmarks/soak.py [--minutes 10] [--every 15] [--seed 0]

One `agentrl train` with two scripted engines, two rollout workers and DeepSpeed on a tiny model. Every `every` seconds on
average a process gets SIGKILL, or SIGSTOP, which a machine that hangs looks like. At the end the run is interrupted; then:
every task draw is recorded once with all its members, no trained token is older than the bound, steps rise by one, and no
process is left. Writes benchmarks/results/soak.json and leaves with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results" / "soak.json"
LETTERS = Path(__file__).resolve().parents[1] / "tests" / "run" / "letters.py"
AGENTRL = str(Path(sys.executable).with_name("agentrl"))
MARK = "AGENTRL_SOAK_MARK"
VICTIMS = {"engine": "ScriptedActor", "worker": "RolloutWorker"}
STALENESS, SAMPLES, WARM = 2, 4, 20


class Soaked:
    """The run, its processes, and what was done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        from agentrl.trainers.tiny import make_tiny

        self.folder = folder
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.memory: list[dict[int, float]] = []
        self.mark = uuid.uuid4().hex
        model = make_tiny("tiny-text", folder / "model", max_steps=0)
        engine = ["--engine", "scripted", "--engine.script", f"{LETTERS}:uneven_reply", "--engine.count", "2"]
        sizes = ["--train.batch-groups", "4", "--rollout.n-samples", str(SAMPLES), "--rollout.workers", "2"]
        lag = ["--train.max-staleness", str(STALENESS), "--engine.max-restarts", "100000", "--train.steps", "1000000"]
        times = ["--rollout.episode-timeout-s", "40", "--rollout.call-timeout-s", "20", "--watchdog.warn-after", "30"]
        files = ["--run.dir", str(folder), "--run.name", "run", "--eval.no-enable", "--ckpt.every", "20"]
        retries = ["--rollout.retries", "1000", "--rollout.max-error-rate", "1"]
        what = ["--env", f"{LETTERS}:Letters", "--env.opt", "turns=3", "--model", str(model), *retries]
        self.log = (folder / "log").open("w")
        environment = {**os.environ, MARK: self.mark}
        command = [AGENTRL, "train", *what, *engine, *sizes, *lag, *times, *files]
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def steps(self) -> list[int]:
        metrics = self.folder / "run" / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
        return [json.loads(line)["step"] for line in lines]

    def strike(self) -> None:
        """One process, at random."""
        kind = self.random.choice(list(VICTIMS))
        blow = self.random.choices([signal.SIGKILL, signal.SIGSTOP], [3, 1])[0]
        victims = [p.pid for p in self.processes() if f"ray::{VICTIMS[kind]}" in " ".join(p.cmdline())]
        if victims:
            os.kill(self.random.choice(victims), blow)
            self.done[f"{kind} {blow.name}"] += 1

    def processes(self) -> Iterator[psutil.Process]:
        """All that the run started and that lives."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def soak(self, minutes: float, every: float) -> None:
        """Wait for the first steps, then strike again and again. Raises RuntimeError when the run ends by itself."""
        self._alive_until(lambda: len(self.steps()) >= WARM, 600)
        self.memory.append(self._mib())
        ends = time.monotonic() + 60 * minutes
        while (left := ends - time.monotonic()) > 0:
            pause = min(left, self.random.expovariate(1 / every))
            self._alive_until(lambda until=time.monotonic() + pause: time.monotonic() >= until, pause + 5)
            self.strike()
        aim = len(self.steps()) + 2
        self._alive_until(lambda: len(self.steps()) >= aim, 600)
        self.memory.append(self._mib())

    def _mib(self) -> dict[int, float]:
        """Memory of each process, a page that several have in equal parts."""
        found = {}
        for process in self.processes():
            with suppress(psutil.Error):  # it ended meanwhile
                found[process.pid] = process.memory_full_info().pss / 2**20
        return found

    def unharmed_mib(self) -> list[int]:
        """Memory of the processes that lived from the first blow to the last: then, and now."""
        same = set.intersection(*(set(moment) for moment in self.memory))
        return [round(sum(moment[pid] for pid in same)) for moment in self.memory]

    def _alive_until(self, condition: Any, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError("the run ended by itself")
            if time.monotonic() > ends:
                raise RuntimeError(f"the run stands still, after step {(self.steps() or [0])[-1]}")
            time.sleep(0.5)

    def end(self) -> tuple[int, int]:
        """(exit code after an interrupt, processes left 30 s later, which are then ended)."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(120)
        ends = time.monotonic() + 30
        while (left := list(self.processes())) and time.monotonic() < ends:
            time.sleep(0.5)
        self.kill()
        return code, len(left)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()


def faults(soaked: Soaked) -> list[str]:
    """What is wrong with the records of the run."""
    found = []
    run = soaked.folder / "run"
    lines = [json.loads(line) for path in sorted((run / "rollouts").glob("*.jsonl")) for line in path.open()]
    seen = Counter((line["draw"], line["sample"]) for line in lines if line["outcome"] != "stale")
    draws = {draw for draw, _ in seen}
    if twice := [key for key, count in seen.items() if count > 1]:
        found.append(f"{len(twice)} episodes are recorded twice, as {twice[0]}")
    if missing := set(range(max(draws) + 1)) - draws:
        found.append(f"{len(missing)} draws are missing, as {min(missing)}")
    if len(seen) != len(draws) * SAMPLES:
        found.append(f"{len(draws)} groups of {SAMPLES} have {len(seen)} episodes")
    steps = soaked.steps()
    if steps != list(range(1, len(steps) + 1)):
        found.append("steps do not rise by one")
    trained = [line for line in lines if line["outcome"] == "trained"]
    old = [line for line in trained for row in line["rows"] if line["step"] - 1 - _oldest(row) > STALENESS]
    if old:
        found.append(f"{len(old)} trained episodes are too old")
    return found


def _oldest(row: dict[str, Any]) -> int:
    return min(v for v, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two strikes, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = Soaked(Path(folder), options.seed)
        try:
            soaked.soak(options.minutes, options.every)
            code, left = soaked.end()
        except RuntimeError as error:
            print((Path(folder) / "log").read_text()[-5000:], f"\n{error}")
            return 1
        finally:
            soaked.kill()
        wrong = faults(soaked)
        wrong += [f"the run left with {code}"] * (code != 130) + [f"{left} processes are left"] * (left > 0)
        report = {
            "minutes": options.minutes,
            "struck": dict(soaked.done),
            "steps": len(soaked.steps()),
            "unharmed_mib": soaked.unharmed_mib(),
            "wrong": wrong,
        }
    print(json.dumps(report, indent=1))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
