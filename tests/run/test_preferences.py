"""SFT, a reward model and PPO as examples/preferences.py has them, for real and with few updates: each stage takes what the
one before it left.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AGENTRL = str(Path(sys.executable).with_name("agentrl"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "preferences.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def finish(folder: Path, *argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def scale(folder: Path) -> tuple[float, float]:
    config = json.loads((folder / "config.json").read_text())
    return config["mean"], config["std"]


def test_the_chain_of_the_example(tmp_path: Path) -> None:
    from agentrl.trainers.tiny import make_tiny

    finish(tmp_path, sys.executable, str(EXAMPLE), "data")
    make_tiny("tiny-text", tmp_path / "tiny", max_steps=0)
    chats = ("--data.path", "data/chats_train.jsonl", "--data.input-key", "prompt", "--data.answer-key", "answer")
    finish(tmp_path, AGENTRL, "sft", "--model", "tiny", *chats, "--train.steps", "2", "--run.name", "sft")
    assert [record["step"] for record in records(tmp_path, "sft")] == [1, 2]

    pairs = ("--data.path", "data/pairs_train.jsonl", "--data.test-path", "data/pairs_test.jsonl")
    bounds = ("--train.steps", "4", "--train.batch", "16", "--eval.every", "2", "--eval.samples", "32")
    finish(
        tmp_path, AGENTRL, "rm", "--model", "runs/sft/final", *pairs, *bounds, "--optim.ema", "0.5", "--run.name", "rm"
    )
    scored = records(tmp_path, "rm")
    assert [record["step"] for record in scored if "eval/loss" in record] == [0, 2, 4]
    assert all({"eval/accuracy", "eval/score_mean", "eval/score_std"} <= scored[i].keys() for i in (0, 2, 4))
    final = tmp_path / "runs" / "rm" / "final"
    assert scale(final) == (scored[-1]["eval/score_mean"], scored[-1]["eval/score_std"])
    before = scale(final)
    (final / "config.json").unlink()
    finish(tmp_path, AGENTRL, "rm", "--resume", "latest", "--run.name", "rm")
    assert scale(final) == before, "a run that has ended, resumed"
    best = (tmp_path / "runs" / "rm" / "checkpoints" / "best").read_text()
    finish(tmp_path, AGENTRL, "export", f"runs/rm/checkpoints/{best}", "exported")
    record = scored[int(best.removeprefix("step_"))]
    assert scale(tmp_path / "exported") == (record["eval/score_mean"], record["eval/score_std"])

    prompts = ("--data.path", "data/prompts_train.jsonl", "--data.input-key", "prompt", "--reward", "runs/rm/final")
    few = (
        "--train.steps",
        "1",
        "--train.batch-groups",
        "2",
        "--rollout.n-samples",
        "2",
        "--rollout.max-new-tokens",
        "4",
    )
    finish(
        tmp_path, AGENTRL, "train", "--model", "runs/sft/final", *prompts, "--algo", "ppo", *few, "--run.name", "ppo"
    )
    last = records(tmp_path, "ppo")[-1]
    assert math.isfinite(last["reward/mean"]) and math.isfinite(last["critic/loss"])
    assert (tmp_path / "runs" / "ppo" / "final" / "model.safetensors").is_file()
