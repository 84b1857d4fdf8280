"""Reward functions for single-turn training, alone or together.

    agentrl train --data.path examples/sums.jsonl --data.test-path examples/sums_test.jsonl --data.input-key question \\
        --data.label-key answer --data.tools-key tools --reward examples/reward.py:asks_calculator \\
        --reward examples/reward.py:brevity --reward.weights 1 0.1

A function names what it wants of prompt, completion, label, row, images, task, prompt_text, query. It may be `async def`.
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


def asks_calculator(prompt: str, completion: str) -> float:
    """1 for a call of the calculator with the expression of the question, as in 2+44=?."""
    asked = re.findall(r'"expression":\s*"([^"]*)"', completion)
    return float(asked == [prompt.removesuffix("=?")])


async def last_number(completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the last number with the row's `answer`. No number at all is no verdict, not a 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    if not numbers:
        return {"reward": None, "metrics": {"numbers": 0}}
    right = float(numbers[-1]) == float(row["answer"])
    return {"reward": float(right), "score": float(right), "metrics": {"numbers": len(numbers)}}
