"""What both trainers are given: prompts, rewards, a slow calculator, and conversations that show how it is done.

`counting` is one turn. "Count to 12." is answered by the numbers and the end token, so a prompt has a natural length, and
no limit or stop word sets it; the last numbers are log-normal. `sums` takes three turns: `17*23+58=?` is two calls of the
calculator and an answer, and a call takes its time, log-normal too.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from typing import Any

from agentrl import Action, Task, ToolEnv, tool

P99 = 2.3263478740408408
"""Standard deviations from the median of a normal distribution to its 99th percentile."""
MEDIAN_COUNT, COUNT_TAIL, MAX_COUNT = 10, 7.0, 80
MEDIAN_WAIT_S, WAIT_TAIL = 0.5, 8.0
TOOL_TURNS = 2


def long_tailed(rng: random.Random, median: float, tail: float) -> float:
    """A log-normal draw; `tail` = its 99th percentile over its median."""
    return median * math.exp(math.log(tail) / P99 * rng.gauss(0.0, 1.0))


class Waits:
    """Seconds that calls take, in the order in which they are made: the same for every run. `made` keeps (start, seconds)."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.made: list[tuple[float, float]] = []

    async def wait(self) -> None:
        seconds = long_tailed(self._rng, MEDIAN_WAIT_S, WAIT_TAIL)
        self.made.append((time.monotonic(), seconds))
        await asyncio.sleep(seconds)

    def serial_excess(self, gap_s: float = 0.1) -> float:
        """Seconds that would be gained if calls that followed each other without a pause had run at once."""
        rounds: list[list[tuple[float, float]]] = []
        for start, seconds in self.made:
            last = rounds[-1][-1] if rounds else None
            if last is None or start - sum(last) > gap_s:
                rounds.append([])
            rounds[-1].append((start, seconds))
        return sum(sum(seconds for _, seconds in made) - max(seconds for _, seconds in made) for made in rounds)


WAITS = Waits()


def evaluate(expression: str) -> int:
    """`a*b` or `a+b`. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*([*+])\s*(\d{1,9})\s*", expression)
    if found is None:
        raise ValueError(f"{expression!r} is not a product or sum of two numbers")
    left, sign, right = int(found[1]), found[2], int(found[3])
    return left * right if sign == "*" else left + right


# ------------------------------------------------------------------ counting


def numbers(last: int) -> str:
    return " ".join(map(str, range(1, last + 1)))


def counting(prompts: int, seed: int) -> list[dict[str, Any]]:
    """Rows with `prompt` (messages) and `label` (the last number)."""
    rng = random.Random(f"counting {seed}")
    rows = []
    for _ in range(prompts):
        last = min(MAX_COUNT, max(2, round(long_tailed(rng, MEDIAN_COUNT, COUNT_TAIL))))
        rows.append({"prompt": [{"role": "user", "content": f"Count to {last}."}], "label": str(last)})
    return rows


def counted(completion: str, label: str) -> float:
    """The share of the numbers that are right, counted from the first, of the longer of what was said and what was asked."""
    said, asked = completion.split(), numbers(int(label)).split()
    right = next((i for i, (a, b) in enumerate(zip(said, asked, strict=False)) if a != b), min(len(said), len(asked)))
    return right / max(len(said), len(asked))


# ------------------------------------------------------------------ sums


def sums(prompts: int, seed: int) -> list[dict[str, Any]]:
    """Rows with `prompt` (messages), `product` and `rest` (the two expressions), and `label` (the value)."""
    rng = random.Random(f"sums {seed}")
    rows = []
    for _ in range(prompts):
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        question = {"role": "user", "content": f"{a}*{b}+{c}=?"}
        expressions = {"product": f"{a}*{b}", "rest": f"{a * b}+{c}", "label": str(a * b + c)}
        rows.append({"prompt": [question], **expressions})
    return rows


def solved(completion: str, label: str) -> float:
    """Near 1 when the last number is near the label."""
    found = re.findall(r"\d+", completion)
    if not found:
        return 0.0
    return 1.0 / (1.0 + abs(math.log((int(found[-1][:12]) + 1) / (int(label) + 1))))


class Sums(ToolEnv):
    """`17*23+58=?` with a calculator that knows one operation at a time and takes its time."""

    max_turns = TOOL_TURNS + 1

    @classmethod
    def tasks(cls, split: str = "train", prompts: int = 1000, seed: int = 0) -> list[Task]:
        rows = sums(prompts, seed)
        return [Task(str(i), row["prompt"][0]["content"], row["label"]) for i, row in enumerate(rows)]

    def __init__(self, prompts: int = 1000, seed: int = 0) -> None:
        super().__init__()

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: As in 17*23.
        """
        await WAITS.wait()
        return str(evaluate(expression))

    def reward(self, answer: Action) -> float:
        return solved(answer, str(self.task.label))


# ------------------------------------------------------------------ what is shown first


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Conversations of both kinds in turn, with the `tools` of each, from a seed that no run uses."""
    shown = [_counted(row) for row in counting(count // 2, -1)]
    asked = [_summed(row) for row in sums(count - count // 2, -1)]
    return [row for pair in zip(shown, asked, strict=False) for row in pair]


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*row["prompt"], {"role": "assistant", "content": numbers(int(row["label"]))}], "tools": None}


def _summed(row: dict[str, Any]) -> dict[str, Any]:
    messages = list(row["prompt"])
    for expression in (row["product"], row["rest"]):
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculator", "content": str(evaluate(expression))})
    messages.append({"role": "assistant", "content": row["label"]})
    return {"messages": messages, "tools": Sums.tools}
