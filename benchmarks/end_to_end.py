"""Whole runs against TRL's GRPO: the same small model, prompts, rollouts, updates and hyper-parameters, on two CPU cores.

    PYTHONPATH=FOLDER_OF_TRL python benchmarks/end_to_end.py --model FOLDER_OF_SMOLLM2 [--jobs counting sums] [--steps 3]

`counting`: one turn, whose length has a long tail by nature. `sums`: three turns, with calls of a tool between them that take
log-normal times (median 0.5 s, 99th percentile 8 times that). The model is first shown a few conversations of both kinds,
so that it knows when to stop and how to call (`--prepared FOLDER` keeps it). Both then make GRPO updates in float32, from
the first episode to the end of the last update; starting is reported beside. Processor seconds are those of all processes of
a run. Each way and the load of the machine is written to benchmarks/results/end_to_end.json; ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from end_to_end_parts.meter import Meter
from end_to_end_parts.ours import Found, Job, prepare, train

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "end_to_end.json"
JOBS = {
    "counting": Job("counting", groups=4),
    "sums": Job("sums", groups=4, turn_tokens=64, all_tokens=192),
}
OURS: dict[str, dict[str, Any]] = {"agentrl": {}, "agentrl, synchronous": {"--train.max-staleness": 0}}
"""The default, a thread for the engine and one for the trainer; and a run in which the two take turns, as with TRL."""
TRL = {
    "TRL": ("transformers", 2),
    "TRL, one thread": ("transformers", 1),
    "TRL, continuous batching": ("batching", 2),
    "TRL, vLLM": ("vllm", 2),
}
"""What generates, and threads. Two threads that wait for each other lose much where the machine is shared; one does not."""
DEFAULT = ("TRL", "TRL, one thread", "agentrl", "agentrl, synchronous")


def theirs(job: Job, model: str, folder: Path, meter: Meter, engine: str, threads: int) -> Found:
    out = folder / "found.json"
    command = [sys.executable, "-m", "end_to_end_parts.peer", json.dumps(asdict(job)), model, engine, str(out)]
    given = time.time()
    meter.run(command, cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"})
    found = json.loads(out.read_text())
    return Found(**found, start_s=found["began"] - given)


def measure(job: Job, model: str, way: str) -> dict[str, Any]:
    """One way, once. `load` = processes that wanted a core, over the last minute, before and after."""
    meter, load = Meter(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        if way in TRL:
            found = theirs(job, model, Path(folder), meter, *TRL[way])
        else:
            found = train(job, model, Path(folder), meter, OURS[way])
    load.append(os.getloadavg()[0])
    return summary(found, meter.cpu_seconds(found.began, found.ended), job) | {"load": load}


def summary(found: Found, cpu_s: float, job: Job) -> dict[str, Any]:
    """Seconds and rates of a run."""
    wall_s = found.ended - found.began
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": found.tokens,
        "tokens_per_s": found.tokens / wall_s,
        "tokens_per_cpu_s": found.tokens / cpu_s,
        "rollouts": job.rollouts * job.steps,
        "updates": job.steps,
        "start_s": found.start_s,
        "rewards": found.rewards,
        "lengths": found.lengths,
        **found.extra,
    }


def ratios(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each of our ways against each of TRL's, as "OURS / TRL'S". Above 1 = ours takes less, or samples more."""
    pairs = [(one, other) for one in ways if one in OURS for other in ways if other in TRL]
    return {f"{one} / {other}": against(ways[one], ways[other]) for one, other in pairs}


def against(one: Mapping[str, Any], trl: Mapping[str, Any]) -> dict[str, float]:
    """`tools_at_once` = the wall clock if TRL's calls had not queued."""
    found = {
        "wall": trl["wall_s"] / one["wall_s"],
        "cpu": trl["cpu_s"] / one["cpu_s"],
        "tokens": one["tokens"] / trl["tokens"],
        "tokens_per_s": one["tokens_per_s"] / trl["tokens_per_s"],
        "tokens_per_cpu_s": one["tokens_per_cpu_s"] / trl["tokens_per_cpu_s"],
    }
    if trl["serial_excess"]:
        found["tools_at_once"] = (trl["wall_s"] - trl["serial_excess"]) / one["wall_s"]
    return found


def rounded(value: Any) -> Any:
    """Three decimals, at any depth."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M, or of a model like it")
    parser.add_argument(
        "--prepared", type=Path, help="folder for the model that was shown how; made when it is not there"
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--ways", nargs="+", choices=[*TRL, *OURS], default=list(DEFAULT))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(options.model, options.prepared or Path(folder) / "prepared")
        results = json.loads(options.out.read_text()) if options.out.exists() else {}
        for name in options.jobs:
            job = replace(JOBS[name], steps=options.steps)
            known = results.setdefault(name, {"ways": {}})
            for way in options.ways:
                known["ways"][way] = one = measure(job, model, way)
                print(
                    f"{name}, {way}: {one['wall_s']:.0f} s, {one['cpu_s']:.0f} CPU s, {one['tokens']:.0f} tokens",
                    flush=True,
                )
                known["times_trl"] = ratios(known["ways"])
                options.out.write_text(json.dumps(rounded(results), indent=1) + "\n")
    for name in options.jobs:
        for way, found in results[name]["times_trl"].items():
            print(f"{name}, {way}:", ", ".join(f"{key} {value:.2f}x" for key, value in found.items()))


if __name__ == "__main__":
    main()
