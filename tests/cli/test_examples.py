"""The example of prompts in a file with a reward function, played."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_prompts_with_a_reward_file(agentrl: Callable[..., Any], models: Callable[[str], str], tmp_path: Path) -> None:
    data = (
        "--data.path",
        EXAMPLES / "sums.jsonl",
        "--data.input-key",
        "question",
        "--data.label-key",
        "answer",
        "--data.tools-key",
        "tools",
    )
    judged = ("--reward", f"{EXAMPLES / 'reward.py'}:asks_calculator", "--reward", f"{EXAMPLES / 'reward.py'}:brevity")
    played = ("--engine", "random", "--model", models("tiny-text"), "-n", "3", "--rollout.max-new-tokens", "6")
    said = agentrl("rollout", *data, *judged, "--reward.weights", "1", "0.1", *played, "--out", tmp_path / "out.jsonl")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    rows = [json.loads(line) for line in (EXAMPLES / "sums.jsonl").open()]
    assert len(lines) == 3 and all(0 <= line["total_reward"] <= 1.1 for line in lines)
    for line in lines:
        row = rows[int(line["task_id"].removeprefix("row-"))]
        assert line["messages"][0]["content"] == row["question"]
        assert line["total_reward"] <= 0.1 or row["question"].removesuffix("=?") in line["messages"][-1]["content"]
