"""Every algorithm on screenshot_math: do they learn, and how fast, at equal samples?

    python benchmarks/learning.py [--algos grpo rloo ...] [--steps 60] [--plot-only]

`ppo`, `reinforce_pp` and `grpo` run with three seeds, the others with one; otherwise only the algorithm's name is given, so
each has its preset and the default learning rate. Results already in benchmarks/results/learning.json are kept, those of the
algorithms named are measured again. Draws docs/learning.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from main_job import run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PICTURE = ROOT / "docs" / "learning.png"
THREE_SEEDS = ("ppo", "reinforce_pp", "grpo")
ONE_SEED = ("reinforce_pp_baseline", "rloo", "dr_grpo", "dapo", "gspo", "cispo")
WINDOW = 5

Results = dict[str, list[dict[str, Any]]]


def measure(algos: list[str], steps: int) -> None:
    """Run them one after the other and save after each."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for algo in algos:
        results[algo] = []
        for seed in range(3 if algo in THREE_SEEDS else 1):
            with tempfile.TemporaryDirectory() as folder:
                results[algo].append(run(seed, folder, algo=algo, options=["--train.steps", str(steps)]))
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def smooth(values: list[float]) -> list[float]:
    """The mean of the last WINDOW values."""
    return [
        sum(values[max(0, i - WINDOW + 1) : i + 1]) / len(values[max(0, i - WINDOW + 1) : i + 1])
        for i in range(len(values))
    ]


def plot(results: Results) -> None:
    """One panel an algorithm: the training reward of each seed, and the held-out reward before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 3
    rows = -(-len(results) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(9, 2.6 * rows), sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(results) :]:
        panel.set_visible(False)
    for panel, (algo, runs) in zip(panels.flat, results.items(), strict=False):
        for number, result in enumerate(runs):
            colour = f"C{number}"
            panel.plot(range(1, len(result["reward"]) + 1), smooth(result["reward"]), color=colour, linewidth=1)
            for name, marker in (("sampled", "o"), ("greedy", "^")):
                panel.plot(*zip(*result["evaluations"][name], strict=True), marker, color=colour, markersize=5)
        panel.set_title(algo, fontsize=9)
        panel.axhline(0.9, color="grey", linestyle=":", linewidth=1)
        panel.set_ylim(0.2, 1.02)
    figure.supxlabel("update (128 rollouts each)", fontsize=9)
    figure.supylabel("mean reward: training (line), held out sampled (dot), greedy (triangle)", fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=[*THREE_SEEDS, *ONE_SEED])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot-only", action="store_true")
    options = parser.parse_args()
    if not options.plot_only:
        measure(options.algos, options.steps)
    results: Results = json.loads(RESULTS.read_text())
    plot(results)
    for algo, runs in results.items():
        for result in runs:
            ends = {
                name: [round(points[0][1], 2), round(points[-1][1], 2)]
                for name, points in result["evaluations"].items()
            }
            print(f"{algo:24} seed {result['seed']}: {len(result['reward'])} updates, held out {ends}")


if __name__ == "__main__":
    main()
