"""Asynchronous against synchronous rollouts, and what the scheduler costs.

    python benchmarks/async.py [--only speed scheduler memory] [--steps 24]

`speed`: episodes a second where waiting dominates (a scripted engine and an environment with long-tailed waits, fixed seeds),
for each staleness, with `drop` and its losses beside, and with draining in the place of partial rollouts; each beside what the
simulator gives as the bound, and what a bare loop of sleeps reaches of it on a machine that others use too. `scheduler`:
dispatcher and buffer alone, on episodes that end at once. `memory`: the process over 300 steps of episodes with pictures of 1
MB. Prints ratios; all of it goes to benchmarks/results/async.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from async_parts import LIMITS, TURNS, Waits, make_loop, simulated, waiting_env
from async_simulator import simulate
from PIL import Image

from agentrl import Env, GenerationRequest, Reply, Task
from agentrl.collector import spare_collector
from agentrl.config import Config
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.episode import EpisodeOrder, EpisodeResult
from agentrl.rollout.ledger import GroupLedger
from agentrl.rollout.task_source import TaskSource
from agentrl.trajectory import Row

RESULTS = Path(__file__).resolve().parent / "results" / "async.json"
WAITS = Waits(generation=0.3, env=0.1, tail=8.0)
TRAIN_S = 0.25
GROUPS, N = 8, 4

MODES: dict[str, dict[str, Any]] = {
    "sync": {"train": {"max_staleness": 0}},
    "staleness 1": {"train": {"max_staleness": 1}},
    "staleness 2": {"train": {"max_staleness": 2}},
    "staleness 4": {"train": {"max_staleness": 4}},
    "staleness 1, draining": {"train": {"max_staleness": 1}, "rollout": {"partial": False}},
    "staleness 2, draining": {"train": {"max_staleness": 2}, "rollout": {"partial": False}},
    "staleness 2, drop, first done, x1.5": {
        "train": {"max_staleness": 2, "stale": "drop"},
        "rollout": {"order": "first_done", "oversample": 1.5},
    },
}


# ------------------------------------------------------------------ speed


def speed(steps: int) -> dict[str, Any]:
    """Each mode, with its ratios to the synchronous run and to the bound. A short run before them loads every module."""
    asyncio.run(played(configure(1, MODES["sync"])))
    found: dict[str, Any] = {"bare": asyncio.run(bare(configure(steps, MODES["sync"])))}
    print(f"bare loop of sleeps: {found['bare']['of_bound']:.0%} of the bound", flush=True)
    for name, mode in MODES.items():
        config = configure(steps, mode)
        bound = simulate(simulated(config, WAITS, TRAIN_S)).groups_per_s * N
        found[name] = one = asyncio.run(played(config)) | {"bound": bound}
        one["of_bound"] = one["episodes_per_s"] / bound
        one["of_bare"] = one["of_bound"] / found["bare"]["of_bound"]
        one["speedup"] = one["episodes_per_s"] / found["sync"]["episodes_per_s"]
        print(
            f"{name}: {one['episodes_per_s']:.1f} episodes/s, {one['speedup']:.2f}x sync, {one['of_bound']:.0%} of the bound "
            f"({one['of_bare']:.0%} of what sleeping alone reaches), "
            f"{one['lost_tokens']:.0%} of the tokens lost",
            flush=True,
        )
    for staleness in (1, 2):
        name = f"staleness {staleness}"
        gain = found[name]["episodes_per_s"] / found[f"{name}, draining"]["episodes_per_s"]
        found[f"{name}, draining"]["partial_gains"] = gain
        print(f"{name}: partial rollouts against draining {gain:.2f}x")
    return found


def configure(steps: int, mode: dict[str, Any]) -> Config:
    sections = {
        "train": {"batch_groups": GROUPS, "steps": steps} | mode["train"],
        "rollout": {"n_samples": N} | mode.get("rollout", {}),
        "log": {"rollouts": False},
    }
    return Config.model_validate(sections)


async def bare(config: Config) -> dict[str, float]:
    """The synchronous run without agentrl: the same waits in a few lines. What it misses of the bound, the machine takes."""
    lengths, steps = WAITS.lengths(N), config.train.steps or 1
    began = time.monotonic()
    for step in range(steps):
        draws = range(step * GROUPS, (step + 1) * GROUPS)
        await asyncio.gather(*(_in_parts(length) for draw in draws for length in lengths(draw)))
        await asyncio.sleep(TRAIN_S)
    episodes_per_s = steps * GROUPS * N / (time.monotonic() - began)
    bound = simulate(simulated(config, WAITS, TRAIN_S)).groups_per_s * N
    return {"episodes_per_s": episodes_per_s, "of_bound": episodes_per_s / bound}


async def _in_parts(length: float) -> None:
    """As many sleeps as an episode has waits."""
    for _ in range(2 * TURNS):
        await asyncio.sleep(length / (2 * TURNS))


async def played(config: Config) -> dict[str, float]:
    """The run for real."""

    def script(request: GenerationRequest) -> Reply:
        return Reply([3, 1], delay_s=WAITS.of_generation(request.sampling.seed or 0))

    with tempfile.TemporaryDirectory() as folder:
        loop = make_loop(Path(folder), config, waiting_env(WAITS), script, TRAIN_S)
        began, busy = time.monotonic(), time.process_time()
        await loop.run()
        seconds = time.monotonic() - began
        records = [json.loads(line) for line in loop.folder.metrics.open()]
    trained = sum(record["groups/trained"] for record in records)
    stale = sum(record["groups/stale"] for record in records)
    return {
        "episodes_per_s": trained * N / seconds,
        "seconds": seconds,
        "cpu_share": (time.process_time() - busy) / seconds,
        "lost_tokens": stale / (stale + trained),
        "staleness_max": max(record["staleness/max"] for record in records),
        "bubble": float(np.mean([record["time/bubble"] for record in records[1:]])),
    }


# ------------------------------------------------------------------ scheduler


class AtOnce:
    """Episodes of three tokens that end as soon as the loop comes to them."""

    def __init__(self) -> None:
        self.version = 0
        self._mask = np.array([False, True, True])

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        await asyncio.sleep(0)
        versions = np.full(3, self.version, np.int32)
        row = Row(np.arange(3, dtype=np.int32), self._mask, np.zeros(3, np.float32), versions, np.zeros(3, np.float32))
        return EpisodeResult(
            order.rollout_id, order.group_id, order.draw, order.sample, order.task.id, "none", rows=[row], total_reward=1.0,
            score=1.0,
        )  # fmt: skip


def scheduler(groups: int) -> dict[str, Any]:
    """Episodes a second of CPU time: along a long run, and with more and more groups in flight."""
    few, many = configure(1, {"train": {"max_staleness": 1}}), {}
    along = asyncio.run(scheduled(few, groups, parts=5))
    print("episodes/s along", groups, "groups:", *(f"{value:.0f}" for value in along), flush=True)
    for batch in (8, 64, 512):
        config = configure(1, {"train": {"max_staleness": 3, "batch_groups": batch}})
        many[batch * 4] = asyncio.run(scheduled(config, 8192, parts=1))[0]
        print(f"episodes/s with {batch * 4} groups in flight: {many[batch * 4]:.0f}", flush=True)
    return {"groups": groups, "along": along, "in_flight": many}


async def scheduled(config: Config, groups: int, parts: int) -> list[float]:
    """Episodes a second in each of so many parts of a run."""
    player, size = AtOnce(), config.train.batch_groups
    ledger = GroupLedger(config, draws=None, wanted=groups, keep=lambda group: True)
    tasks = TaskSource([Task(str(i)) for i in range(1000)], seed=0, shuffle=True)
    dispatcher = Dispatcher(config, player, tasks, LIMITS, ledger)
    dispatcher.start()
    found = []
    for _ in range(parts):
        began = time.process_time()
        for _ in range(groups // size // parts):
            batch = await dispatcher.next_batch()
            assert batch is not None
            player.version += 1
            dispatcher.settle(player.version)
        found.append(groups // parts * N / (time.process_time() - began))
    await dispatcher.stop()
    return found


# ------------------------------------------------------------------ memory


class Pictures(Env):
    """One turn, opened by a picture of about 1 MB that is like no other."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        noise = self.np_random.integers(0, 256, (590, 590, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "png", compress_level=0)
        return [Image.open(file), "What is this?"], {}

    def step(self, action: Any) -> Any:
        return "", 1.0, True, False, {}


async def memory(steps: int) -> dict[str, Any]:
    """Resident memory after a sixth of the steps, halfway and at the end, in MiB."""
    from agentrl.trainers.tiny import make_tiny

    from agentrl.assemble import load_processor

    config = Config.model_validate(
        {"train": {"batch_groups": 2, "steps": steps, "max_staleness": 1}, "rollout": {"n_samples": 2}}
    )
    with tempfile.TemporaryDirectory() as folder:
        processor = load_processor(str(make_tiny("tiny-vlm", Path(folder) / "model", max_steps=0)), False)
        processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
        stop = processor.tokenizer.eos_token_id
        loop = make_loop(Path(folder), config, Pictures, lambda request: Reply([5, stop]), 0.0, processor)
        await loop.run()
        rss = [json.loads(line)["memory/rss"] / 2**20 for line in loop.folder.metrics.open()]
        images = list(loop.folder.images.glob("*.png"))
        found = {
            "steps": steps,
            "images": len(images),
            "image_mb": sum(p.stat().st_size for p in images) / len(images) / 1e6,
        }
    marks = {"at_a_sixth": rss[steps // 6], "halfway": rss[steps // 2], "at_the_end": rss[-1]}
    print(f"memory over {steps} steps with {len(images)} pictures, MiB:", *(f"{value:.0f}" for value in marks.values()))
    return found | {"rss_mib": marks}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "speed": lambda options: speed(options.steps),
    "scheduler": lambda options: scheduler(options.groups),
    "memory": lambda options: asyncio.run(memory(options.memory_steps)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=24, help="steps of each run of speed")
    parser.add_argument("--groups", type=int, default=100_000, help="groups of scheduler's long run")
    parser.add_argument("--memory-steps", type=int, default=300)
    options = parser.parse_args()
    spare_collector()
    for name in options.only:
        found = PARTS[name](options)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(results | {name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
