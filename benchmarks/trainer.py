"""How fast and how lean the trainer is: ratios to a bare torch loop, to padding, to TRL, and to whole logits.

    python benchmarks/trainer.py [--model PATH_OF_SMOLLM2] [--repeat 3]

Everything runs on one thread. Compared updates take turns on the same rows, and the median of their processor seconds
counts, so that what else the machine does enters as little as can be. Prints one line a ratio and writes
benchmarks/results/trainer.json. TRL is compared where it is installed.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate, under TRL, would take every core

import numpy as np
import torch
from peers import BareLoop, TrlLoop

from agentrl import Row
from agentrl.config import Config
from agentrl.torchvision_ops import ensure_torchvision_imports

RESULTS = Path(__file__).resolve().parent / "results" / "trainer.json"
LR = 1e-6
WANTED = {
    "unpadded": "tokens/s of an update against a bare torch loop, row by row",
    "padded": "tokens/s of an update on long-tailed lengths, against a bare torch loop that pads rows as they come",
    "unpacked": "the same against this trainer without packs, row by row",
    "trl": "the same against TRL's GRPO update",
    "waste": "tokens with padding for each token without, on these lengths: what packing alone can gain",
    "memory": "peak memory of log-probs and their gradient, whole logits against ours",
    "plan_s": "seconds for advantages and packing plan of 100,000 rows, from rows to micro-batches",
}
Update = Callable[[Sequence[Row], Sequence[float]], Any]


def make_rows(lengths: Sequence[int], seed: int = 0) -> list[Row]:
    """Rollouts of random bytes: a third prompt, two thirds completion; groups of 4, rewards 0 and 1."""
    rng = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(lengths):
        mask = np.arange(length) >= max(1, length // 3)
        rows.append(
            Row(
                token_ids=rng.integers(1, 256, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5.5, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                rewards=np.zeros(length, np.float32),
                rollout_id=f"{i}",
                group_id=f"{i // 4}",
                total_reward=float(i % 2),
            )
        )
    return rows


def even(count: int) -> list[int]:
    """Lengths between 64 and 192."""
    return np.random.default_rng(1).integers(64, 193, count).tolist()


def long_tailed(count: int, longest: int) -> list[int]:
    """Lognormal lengths, as of agents that mostly finish soon: median 64, sigma 1."""
    return np.random.default_rng(2).lognormal(np.log(64), 1.0, count).clip(16, longest).astype(int).tolist()


def waste(lengths: Sequence[int], size: int) -> float:
    """Tokens of the lengths padded `size` at a time, for each token of their own."""
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return sum(len(part) * max(part) for part in parts) / sum(lengths)


class Ours:
    """agentrl's trainer: one rank, one update of each batch; without packs as for a model whose rows cannot share one."""

    def __init__(self, path: str, budget: int, *, packs: bool = True) -> None:
        from agentrl.trainers import reading
        from agentrl.trainers.models import unpacked
        from agentrl.trainers.policy_trainer import PolicyTrainer

        sections = {
            "algo": {"name": "reinforce_pp"},
            "model": {"dtype": "float32"},
            "train": {"max_staleness": 0, "micro_batch_tokens": budget},
        }
        config = Config.model_validate(sections)
        load = reading.load_policy
        if not packs:
            reading.load_policy = lambda *args, **options: unpacked(load(*args, **options))
        try:
            self._trainer = PolicyTrainer(config, path, tempfile.mkdtemp(), 1000, LR)
        finally:
            reading.load_policy = load

    def update(self, rows: Sequence[Row], advantages: Sequence[float]) -> None:
        self._trainer.train(rows, 0)


def compare(updates: dict[str, Update], rows: Sequence[Row], repeat: int) -> dict[str, float]:
    """Median processor seconds of each, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    signs = [1.0 if row.total_reward else -1.0 for row in rows]
    for turn in range(repeat + 1):
        for name, update in updates.items():
            began = time.process_time()
            update(rows, signs)
            if turn:
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def trl_or_none(path: str, size: int) -> TrlLoop | None:
    try:
        return TrlLoop(path, LR, size)
    except ImportError as error:
        print(f"TRL is not compared: {error}", flush=True)
        return None


def speed(name: str, path: str, rows: int, longest: int, size: int, repeat: int) -> dict[str, float]:
    """The ratios of one model; above 1 = ours is faster. A micro-batch holds what `size` rows of the longest would."""
    ours, bare, trl = Ours(path, size * longest), BareLoop(path, LR, size), trl_or_none(path, size)
    plain = compare({"ours": ours.update, "unpadded": bare.unpadded}, make_rows(even(rows)), repeat)
    alone = Ours(path, size * longest, packs=False)
    others: dict[str, Update] = {"ours": ours.update, "padded": bare.padded, "unpacked": alone.update}
    if trl is not None:
        others["trl"] = trl.update
    tailed = compare(others, make_rows(long_tailed(rows, longest)), repeat)
    ratios = {f"{name}/unpadded": plain["unpadded"] / plain["ours"]}
    ratios[f"{name}/waste"] = waste(long_tailed(rows, longest), size)
    ratios |= {f"{name}/{other}": tailed[other] / tailed["ours"] for other in others if other != "ours"}
    return ratios


def many_rows(count: int = 100_000) -> list[Row]:
    """Rollouts with up to 512 trained tokens of up to 4000, in groups of 8."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, count).clip(20, 4000).astype(int)
    trained = np.minimum(lengths - 1, rng.lognormal(3.5, 0.8, count).clip(1, 512)).astype(int)
    rewards = rng.integers(0, 2, count).tolist()
    return [
        Row(
            token_ids=np.zeros(length, np.int32),
            loss_mask=np.arange(length) >= length - actions,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            rewards=np.zeros(length, np.float32),
            rollout_id=f"r{i}",
            group_id=f"g{i // 8}",
            total_reward=float(rewards[i]),
        )
        for i, (length, actions) in enumerate(zip(lengths.tolist(), trained.tolist(), strict=True))
    ]


def plan_seconds(algorithm: str, rows: Sequence[Row]) -> float:
    """What a trainer of two ranks does with a batch before its first update, where no model has to score it."""
    from agentrl.trainers.batch import plan_updates
    from agentrl.trainers.objective import Objective
    from agentrl.trainers.scoring import Scores
    from agentrl.trainers.slots import rollout_ids
    from agentrl.trainers.withheld import not_sampled, too_large

    objective = Objective.of(Config.model_validate({"algo": {"name": algorithm}}))

    def once() -> float:
        began = time.process_time()
        too_large(rows), not_sampled(rows)
        decided = objective.decide(rows, objective.advantages(rows, Scores()), Scores(), 0)
        lengths, trained = [len(row) for row in rows], decided.mask.any(1).tolist()
        plan_updates(rollout_ids(rows), lengths, trained, ranks=2, budget=16384)
        return time.process_time() - began

    return statistics.median(once() for _ in range(3))


def memory_ratio() -> float:
    """Each way in a process of its own; what it holds before the step does not count."""
    peaks = {}
    for way in ("ours", "whole"):
        command = [sys.executable, __file__, "--peak", way]
        peaks[way] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return peaks["whole"] / peaks["ours"]


def peak(way: str, tokens: int = 4096, vocabulary: int = 49_152) -> int:
    """KiB that log-probs and their gradient add to a process, for a small trunk under a vocabulary of real size."""
    from agentrl.trainers.models import load_policy
    from agentrl.trainers.packing import pack
    from agentrl.trainers.scorer import TokenScorer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **shape)).save_pretrained(folder)
        policy = load_policy(folder)
    (row,) = make_rows([tokens])
    row.loss_mask[1:] = True
    packed = pack([row], policy, None)
    before = high_water()
    if way == "ours":
        logp, _ = TokenScorer(policy, 1.0)([packed])
    else:
        logits = policy.model(input_ids=packed.ids[None], use_cache=False).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, packed.labels[:, None])
    logp.sum().backward()
    return high_water() - before


def high_water() -> int:
    """KiB of this program at its largest. (getrusage's would be that of the process which started it, if that was larger.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def tiny_model(folder: str) -> str:
    from agentrl.trainers.tiny import make_tiny

    return str(make_tiny("tiny-text", Path(folder) / "tiny", max_steps=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of SmolLM2-135M, or of a model like it")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peak", choices=["ours", "whole"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    ensure_torchvision_imports()
    torch.set_num_threads(1)
    if options.peak:
        print(peak(options.peak))
        return
    rows = many_rows()
    ratios = {f"{algorithm}/plan_s": plan_seconds(algorithm, rows) for algorithm in ("grpo", "reinforce_pp")}
    del rows
    ratios["memory"] = memory_ratio()
    with tempfile.TemporaryDirectory() as folder:
        ratios |= speed("tiny", tiny_model(folder), 64, 1000, 8, options.repeat)
    if options.model:
        ratios |= speed(Path(options.model).name, options.model, 16, 400, 8, options.repeat)
    for name, ratio in ratios.items():
        print(f"{name:24s} {ratio:6.2f}   {WANTED[name.rpartition('/')[2]]}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
