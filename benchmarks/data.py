"""How a run on a large jsonl starts: seconds until every row is checked, and memory, against a small one.

    python benchmarks/data.py [--rows 10000 1000000]

Each size is read in a process of its own: first with an empty cache, then again, then with every prompt's length counted
(SmolLM2-like prompts of about 100 characters, tiny-text's tokenizer). CPU seconds are beside the others, for machines that are
shared. Memory is what the process has for itself, without the pages of files that the kernel can drop at any time. Writes
benchmarks/results/data.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "data.json"


def write(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for i in range(rows):
            question = f"What is {i} + {7 * i}? " + "Think step by step. " * 4
            file.write(json.dumps({"question": question, "answer": 8 * i}) + "\n")


def resident_mb() -> float:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measure(path: str) -> dict[str, Any]:
    """In this process: what loading, and counting lengths, take."""
    from agentrl.assemble import load_processor
    from agentrl.cli.policy import untrained_tiny
    from agentrl.config import DataSection
    from agentrl.data import load_tasks
    from agentrl.data.lengths import fits
    from agentrl.renderer import Renderer

    renderer = Renderer(load_processor(untrained_tiny("tiny-text"), False))
    import datasets  # noqa: F401  what its import takes is not the data's

    before, began, cpu = resident_mb(), time.monotonic(), time.process_time()
    section = DataSection.model_validate({"path": path, "input_key": "question", "label_key": "answer"})
    tasks = load_tasks(section, evaluation=False)
    loaded, loaded_cpu = time.monotonic(), time.process_time()
    kept = tasks.keep(fits(renderer, 1024), "longer than 1024 tokens")
    counted, counted_cpu = time.monotonic(), time.process_time()
    last = kept[len(kept) - 1]
    assert last.label == 8 * (len(kept) - 1)
    return {
        "rows": len(kept),
        "check_s": round(loaded - began, 2),
        "check_cpu_s": round(loaded_cpu - cpu, 2),
        "lengths_s": round(counted - loaded, 2),
        "lengths_cpu_s": round(counted_cpu - loaded_cpu, 2),
        "memory_mb": round(resident_mb() - before, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    results = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "data.jsonl"
            write(path, rows)
            environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache"}
            for cache in ("empty", "filled"):
                command = [sys.executable, __file__, "--one", str(path)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found = {**json.loads(done.stdout.splitlines()[-1]), "cache": cache}
                found["file_mb"] = round(path.stat().st_size / 2**20, 1)
                results.append(found)
                print(found)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
