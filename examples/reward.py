"""Reward functions for single-turn training, alone or together.

    agentrl train --data.path questions.jsonl --reward examples/reward.py:exact --reward examples/reward.py:brevity \\
        --reward.weights 1 0.1 --algo reinforce_pp --model.path MODEL

A function names what it wants of prompt, completion, label, row, images, task. It may be `async def`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def exact(completion: str, label: Any) -> float:
    """1 for the label's very text."""
    return float(completion.strip() == str(label))


def brevity(completion: str) -> float:
    """1 for an empty answer, 0 from 200 characters on."""
    return max(0.0, 1.0 - len(completion) / 200)


async def last_number(completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the last number with the row's `answer`. No number at all is no verdict, not a 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    if not numbers:
        return {"reward": None, "metrics": {"numbers": 0}}
    right = float(numbers[-1]) == float(row["answer"])
    return {"reward": float(right), "score": float(right), "metrics": {"numbers": len(numbers)}}
