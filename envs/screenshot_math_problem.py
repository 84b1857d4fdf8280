"""The arithmetic behind the page: making a problem, splitting train from test, judging a reply.

Everything here is a function of plain values.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence

from agentrl.env import Task
from agentrl.errors import ConfigError, DataError
from agentrl.task_list import TaskList

from .screenshot_math_options import Settings

SPLITS = ("train", "test")
MAX_DRAWS = 2000
_EXPRESSION = re.compile(r"\d{1,6}(?:[-+*]\d{1,6}){0,7}")
_ANSWER = re.compile(r"(?:.*(?:=|answer:?|answer is))?[\s*$]*([-−]?\d{1,12})[\s.*$]*", re.IGNORECASE)


def evaluate(expression: str) -> int:
    """The value of whole numbers joined by + - * without spaces, `*` first. Raises DataError for anything else."""
    if not _EXPRESSION.fullmatch(expression):
        raise DataError(f"not an expression of whole numbers and + - *: {expression[:60]!r}")
    total = 0
    for sign, term in re.findall(r"([-+]?)([\d*]+)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


def is_test(operands: Sequence[int]) -> bool:
    """Whether numbers in this order are held out, whatever the operators: about one order in ten.

    Never numbers that begin and end alike, and at most one direction of the same numbers, so that every answer of the
    smallest levels can be learned in training. Other orders of the same numbers may be in training.
    """
    code = zlib.crc32(f"screenshot_math/56429/{','.join(map(str, sorted(operands)))}".encode())
    first, last = operands[0], operands[-1]
    return first != last and code % 5 == 0 and (first < last) == bool(code & 1024)


def draw_expression(split: str, index: int, settings: Settings) -> str:
    """The expression of task `index` of a split: always the same, its value never negative."""
    rng = random.Random(f"{split}/{index}")
    for _ in range(MAX_DRAWS):
        operands = [rng.randint(settings.low, settings.high) for _ in range(settings.operands)]
        expression = str(operands[0]) + "".join(rng.choice(settings.operators) + str(n) for n in operands[1:])
        if is_test(operands) == (split == "test") and evaluate(expression) >= 0:
            return expression
    raise ConfigError(
        f"screenshot_math finds no {split} problem with operands from {settings.low} to {settings.high}: widen the range."
    )


class Tasks(TaskList):
    """The tasks of a split. `row["seed"]` is the seed of the page's look."""

    def __init__(self, split: str, settings: Settings) -> None:
        if split not in SPLITS:
            raise ConfigError(f"screenshot_math has the splits {' and '.join(SPLITS)}, not {split!r}.")
        self.split = split
        self.settings = settings

    def __len__(self) -> int:
        return self.settings.size

    def at(self, position: int) -> Task:
        expression = draw_expression(self.split, position, self.settings)
        seed = zlib.crc32(f"{self.split}/{position}/look".encode())
        level = self.settings.level
        return Task(
            id=f"{level}/{self.split}/{position}",
            label=evaluate(expression),
            row={"expression": expression, "seed": seed, "level": level},
        )


def read_answer(reply: str) -> int | None:
    """The whole number a reply gives, or None when it gives none.

    The last line that is not empty must be the number, alone or after `=` or `answer:`; what stands above it (a
    chain of thought) is not read.
    """
    lines = [line for line in reply.splitlines() if line.strip()]
    found = _ANSWER.fullmatch(lines[-1].strip()) if lines else None
    return int(found[1].replace("−", "-")) if found else None


def turn_reward(turn: int) -> float:
    """The reward of a right answer given at `turn` (1 = the first): 1, 1/2, 1/4, …"""
    return 0.5 ** (turn - 1)


def direction(answer: int, label: int) -> str:
    """The hint after a wrong answer."""
    return "higher" if label > answer else "lower"
