"""Reward per sample against TRL's GRPO: the same model, prompts, reward, samples and hyper-parameters.

    pip install "trl==1.16.*"
    python benchmarks/learning_peer.py [--steps 40] [--seeds 0 1 2 3 4]

agentrl's tiny text policy writes calculator calls for expressions such as `17*23=?`; reward 1 when the call holds that very
expression. Both train synchronously on 16 prompts x 8 samples a step: GRPO without KL, AdamW, lr 2e-4 falling linearly, clip
0.2, temperature 1. What is compared is the mean training reward, over all steps and over the last ten.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.envs.calculator_math import CalculatorTasks

from agentrl.cli.policy import tiny_policy
from agentrl.torchvision_ops import ensure_torchvision_imports

RESULTS = Path(__file__).resolve().parent / "results" / "learning_peer.json"
SYSTEM = "tools: calculator(expression)"
GROUPS, SAMPLES, NEW_TOKENS, LR = 16, 8, 64, 2e-4
REWARD = """
def right_call(completion, label):
    return float(f'"expression": "{label}"}}' in completion)
"""


def prompts(steps: int, seed: int) -> list[dict[str, Any]]:
    """One pass of the run: every prompt is new."""
    tasks = CalculatorTasks("train")
    rows = (tasks[(seed * 5_000 + i) % len(tasks)] for i in range(steps * GROUPS))
    return [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}],
            "label": task.row["expression"],
        }
        for task in rows
    ]


def ours(model: str, rows: list[dict[str, Any]], folder: Path, seed: int) -> list[float]:
    """The mean reward of each step."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    options = {
        "--algo": "grpo",
        "--model": model,
        "--data.path": folder / "prompts.jsonl",
        "--data.input-key": "prompt",
        "--data.label-key": "label",
        "--reward": f"{folder / 'reward.py'}:right_call",
        "--rollout.n-samples": SAMPLES,
        "--rollout.max-new-tokens": NEW_TOKENS,
        "--train.batch-groups": GROUPS,
        "--train.max-staleness": 0,
        "--optim.lr": LR,
        "--run.seed": seed,
        "--run.dir": folder,
        "--run.name": "run",
    }
    program = str(Path(sys.executable).with_name("agentrl"))
    flags = [str(part) for option in options.items() for part in option]
    subprocess.run([program, "train", "--eval.no-enable", *flags], check=True)
    return [json.loads(line)["reward/mean"] for line in (folder / "run" / "metrics.jsonl").open()]


def trl(model: str, rows: list[dict[str, Any]], folder: Path, seed: int) -> list[float]:
    """The mean reward of each step."""
    ensure_torchvision_imports()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return [float(f'"expression": "{want}"}}' in text) for text, want in zip(texts, label, strict=True)]

    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        num_train_epochs=1,
        learning_rate=LR,
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=options, train_dataset=Dataset.from_list(rows))
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    model = tiny_policy("tiny-text")
    results = []
    for seed in options.seeds:
        rows = prompts(options.steps, seed)
        with tempfile.TemporaryDirectory() as folder:
            curves = {"agentrl": ours(model, rows, Path(folder), seed), "trl": trl(model, rows, Path(folder), seed)}
        results.append({"seed": seed, **curves})
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, part in (("all steps", slice(None)), ("last ten", slice(-10, None))):
        means = {peer: fmean(fmean(result[peer][part]) for result in results) for peer in ("agentrl", "trl")}
        print(f"{name:10} agentrl {means['agentrl']:.3f}  TRL {means['trl']:.3f}")


if __name__ == "__main__":
    main()
