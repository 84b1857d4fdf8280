"""The main job, three seeds: `agentrl train --env screenshot_math --algo reinforce_pp` with no other option but the seed.

    python benchmarks/main_job.py [--seeds 0 1 2] [--plot-only]

Runs one after the other, writes benchmarks/results/main_job.json and docs/main_job.png. What is measured: seconds from the
command to the first update and to its end, and the mean reward on held-out tasks before the first and after the last update.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "main_job.json"
PICTURE = ROOT / "docs" / "main_job.png"
EVALS = {"sampled": "eval/reward/mean", "greedy": "eval/greedy/reward/mean"}


def run(seed: int, folder: str, *, algo: str = "reinforce_pp", options: Sequence[str] = ()) -> dict[str, Any]:
    """One run of the program as a user starts it."""
    program = str(Path(sys.executable).with_name("agentrl"))
    began = time.time()
    command = [program, "train", "--env", "screenshot_math", "--algo", algo, *options]
    subprocess.run([*command, "--run.seed", str(seed), "--run.dir", folder, "--run.name", f"seed-{seed}"], check=True)
    ended = time.time()
    records = [json.loads(line) for line in (Path(folder) / f"seed-{seed}" / "metrics.jsonl").open()]
    return {
        "seed": seed,
        "first_update_s": round(records[1]["time"] - began),
        "whole_s": round(ended - began),
        **curves(records),
    }


def curves(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What is plotted: the training reward of each step, and the evaluations with their steps."""
    trained = [record for record in records if record["step"] > 0]
    return {
        "reward": [record["reward/mean"] for record in trained],
        "evaluations": {
            name: [[record["step"], record[key]] for record in records if key in record] for name, key in EVALS.items()
        },
    }


def plot(results: list[dict[str, Any]]) -> None:
    """Training reward as lines, held-out reward as points at its steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number, result in enumerate(results):
        colour = f"C{number}"
        steps = range(1, len(result["reward"]) + 1)
        axes.plot(
            steps, result["reward"], color=colour, alpha=0.6, linewidth=1, label=f"seed {result['seed']}, training"
        )
        for name, marker in (("sampled", "o"), ("greedy", "^")):
            points = result["evaluations"][name]
            axes.plot(
                *zip(*points, strict=True),
                marker,
                color=colour,
                markersize=8,
                label=f"seed {result['seed']}, held out, {name}",
            )
    axes.axhline(0.9, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="update (128 rollouts each)", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("screenshot_math, REINFORCE++, 0.9 M parameters, two CPU cores")
    axes.legend(fontsize=7, ncols=3, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


def measure(seeds: list[int]) -> None:
    """Run the seeds and save the results after each."""
    results: list[dict[str, Any]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, folder))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    if not options.plot_only:
        measure(options.seeds)
    results = json.loads(RESULTS.read_text())
    plot(results)
    for result in results:
        ends = {
            name: [round(points[0][1], 3), round(points[-1][1], 3)] for name, points in result["evaluations"].items()
        }
        print(f"seed {result['seed']}: first update {result['first_update_s']} s, end {result['whole_s']} s, {ends}")


if __name__ == "__main__":
    main()
