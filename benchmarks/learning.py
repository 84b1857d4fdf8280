"""Every algorithm on screenshot_math: do they learn, and how fast, at equal samples?

    python benchmarks/learning.py [--algos grpo rloo ...] [--steps 60] [--plot-only]

`ppo`, `reinforce_pp` and `grpo` run with three seeds, the others with one; otherwise only the algorithm's name is given, so
each has its preset, the default learning rate, and rollouts that run one version ahead. "reinforce_pp, synchronous" is the same
run, seeds and samples without that. Results already in benchmarks/results/learning.json are kept, those of the algorithms named
are measured again. Draws docs/learning.png.
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
SYNCHRONOUS = "reinforce_pp, synchronous"
VARIANTS: dict[str, tuple[str, list[str]]] = {SYNCHRONOUS: ("reinforce_pp", ["--train.max-staleness", "0"])}
"""What is no algorithm of its own: the algorithm, and the options that it is run with."""
WINDOW = 5

Results = dict[str, list[dict[str, Any]]]


def measure(names: list[str], steps: int, seeds: int | None, out: Path) -> None:
    """Run them one after the other and save after each."""
    results: Results = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        algo, options = VARIANTS.get(name, (name, []))
        results[name] = []
        for seed in range(seeds or (3 if algo in THREE_SEEDS else 1)):
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(run(seed, folder, algo=algo, options=["--train.steps", str(steps), *options]))
            out.write_text(json.dumps(results, indent=1) + "\n")


def smooth(values: list[float]) -> list[float]:
    """The mean of the last WINDOW values."""
    return [
        sum(values[max(0, i - WINDOW + 1) : i + 1]) / len(values[max(0, i - WINDOW + 1) : i + 1])
        for i in range(len(values))
    ]


def plot(results: Results, picture: Path) -> None:
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
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*THREE_SEEDS, *VARIANTS, *ONE_SEED]
    parser.add_argument("--algos", nargs="+", choices=known, default=known, metavar="ALGO", help=", ".join(known))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, help="so many seeds of each")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    if not options.plot_only:
        measure(options.algos, options.steps, options.seeds, options.results)
    results: Results = json.loads(options.results.read_text())
    plot(results, options.picture)
    for algo, runs in results.items():
        for result in runs:
            ends = {
                name: [round(points[0][1], 2), round(points[-1][1], 2)]
                for name, points in result["evaluations"].items()
            }
            print(f"{algo:24} seed {result['seed']}: {len(result['reward'])} updates, held out {ends}")


if __name__ == "__main__":
    main()
