"""SFT and DPO against TRL: processor seconds of the same updates, on the same texts and model, in one run.

    PYTHONPATH=FOLDER_OF_TRL python benchmarks/supervised.py [--model PATH] [--updates 6] [--micro-batches 4]

One thread. Both make as many updates of as many examples, whose lengths have a long tail; the first of each is not counted, nor
is what comes before (tokenising, the reference's log-probabilities). TRL runs its own trainers as their documentation
shows them, with padded micro-batches. Writes benchmarks/results/supervised.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate, under TRL, would take every core

import numpy as np
import torch
from trainer import long_tailed

from agentrl import Renderer
from agentrl.config import DpoConfig, SftConfig
from agentrl.supervised.examples import Item, Pair, as_row, rows_of
from agentrl.supervised.spelling import Speller
from agentrl.torchvision_ops import ensure_torchvision_imports

RESULTS = Path(__file__).resolve().parent / "results" / "supervised.json"
LR = 1e-5
MICRO = {"sft": 8, "dpo": 4}
"""Examples, or pairs, in a micro-batch."""
LETTERS = np.array(list("etaoinshrdlu        "))
Texts = list[dict[str, str]]


def texts(kind: str, count: int, longest: int, seed: int = 0) -> Texts:
    """Prompts and answers of random letters: a third prompt."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> str:
        return "".join(rng.choice(LETTERS, max(1, length)))

    lengths = long_tailed(2 * count, longest)
    if kind == "sft":
        return [{"prompt": text(n // 3) + "\n", "completion": text(2 * n // 3)} for n in lengths[:count]]
    pairs = zip(lengths[::2], lengths[1::2], strict=True)
    return [{"prompt": text(n // 3) + "\n", "chosen": text(2 * n // 3), "rejected": text(2 * m // 3)} for n, m in pairs]


def spelled(rows: Texts, renderer: Renderer) -> list[Item]:
    speller = Speller(renderer)

    def row(prompt: str, answer: str) -> Any:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return as_row(speller.spell(turns), "", None)

    return [
        row(one["prompt"], one["completion"])
        if "completion" in one
        else Pair(row(one["prompt"], one["chosen"]), row(one["prompt"], one["rejected"]))
        for one in rows
    ]


def ours(kind: str, path: str, items: Sequence[Item], size: int, longest: int) -> list[float]:
    """Processor seconds of each update."""
    from agentrl.trainers.supervised_trainer import SupervisedTrainer

    budget = MICRO[kind] * longest * (1 if kind == "sft" else 2)
    sections = {"model": {"dtype": "float32"}, "train": {"micro_batch_tokens": budget, "max_len": longest + 1}}
    config = (SftConfig if kind == "sft" else DpoConfig).model_validate(sections)
    trainer = SupervisedTrainer(config, path, tempfile.mkdtemp(), len(items) // size, LR)
    if kind == "dpo":
        sums = trainer.reference(items)
        for item, chosen, rejected in zip(items, sums[::2], sums[1::2], strict=True):
            assert isinstance(item, Pair)
            item.reference = (chosen, rejected)
    seconds = []
    for step, start in enumerate(range(0, len(items), size)):
        began = time.process_time()
        trainer.train(items[start : start + size], step)
        seconds.append(time.process_time() - began)
    return seconds


def theirs(kind: str, path: str, rows: Texts, size: int) -> list[float]:
    """The same of TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.process_time() - self.began)

    configs: dict[str, Any] = {"sft": SFTConfig, "dpo": DPOConfig}
    trainers: dict[str, Any] = {"sft": SFTTrainer, "dpo": DPOTrainer}
    options = {"precompute_ref_log_probs": True} if kind == "dpo" else {}
    arguments = configs[kind](
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=MICRO[kind],
        gradient_accumulation_steps=size // MICRO[kind],
        learning_rate=LR,
        num_train_epochs=1,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        logging_strategy="no",
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
        **options,
    )
    trainer = trainers[kind](model=path, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[Clock()])
    trainer.train()
    return seconds


def measure(way: str, kind: str, path: str, updates: int, longest: int, micro_batches: int) -> dict[str, Any]:
    """Processor seconds of each update but the first, and the tokens of a mean update."""
    from agentrl.assemble import load_processor

    size = MICRO[kind] * micro_batches
    rows = texts(kind, size * updates, longest)
    items = spelled(rows, Renderer(load_processor(path, False), chat_template="none"))
    lengths = [len(row) for row in rows_of(items)]
    seconds = ours(kind, path, items, size, max(lengths)) if way == "agentrl" else theirs(kind, path, rows, size)
    return {"seconds": seconds[1:], "tokens": sum(lengths) / updates}


def compare(kind: str, options: argparse.Namespace, path: str) -> dict[str, float]:
    """How many times as fast ours is; and tokens/s of each. Each in a process of its own: DeepSpeed and accelerate both set
    what the other reads.
    """
    speeds: dict[str, float] = {}
    for way in ("agentrl", "trl"):
        arguments = [way, kind, path, *map(str, (options.updates, options.longest, options.micro_batches))]
        command = [sys.executable, __file__, "--measure", *arguments]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        speeds[way] = found["tokens"] / statistics.median(found["seconds"])
    named = {f"{kind}/{way}/tokens_per_s": speed for way, speed in speeds.items()}
    return named | {f"{kind}/times_trl": speeds["agentrl"] / speeds["trl"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; agentrl's tiny text model when absent")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--longest", type=int, default=600, help="longest example in tokens")
    parser.add_argument("--micro-batches", type=int, default=4, help="of 8 examples, or 4 pairs, in an update")
    parser.add_argument("--kinds", nargs="+", choices=MICRO, default=list(MICRO))
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    ensure_torchvision_imports()
    torch.set_num_threads(1)
    if options.measure:
        way, kind, path, *sizes = options.measure
        print(json.dumps(measure(way, kind, path, *map(int, sizes))))
        return
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if path is None:
            from agentrl.trainers.tiny import make_tiny

            path = str(make_tiny("tiny-text", Path(folder) / "tiny", max_steps=0))
        for kind in options.kinds:
            found |= compare(kind, options, path)
    for name, value in found.items():
        print(f"{name:28s} {value:10.2f}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    name = "tiny" if options.model is None else Path(options.model).name
    kept[name] = kept.get(name, {}) | {key: round(value, 3) for key, value in found.items()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
