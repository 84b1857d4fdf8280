"""Integer arithmetic with a calculator: the smallest task on which calling a tool pays."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass
from typing import Any

from agentrl.env import Task
from agentrl.errors import ConfigError
from agentrl.messages import Action, Observation
from agentrl.task_list import TaskList
from agentrl.tool_env import ToolEnv, tool

from .safe_arithmetic import evaluate, written

MAX_SHARE_TESTED = 0.1
MAX_NUMBER = 300
_NUMBER = re.compile(r"(?<![\d.)])-\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class CalculatorTasks(TaskList):
    """Expressions drawn without repetition; tests come first in the draw, so they stay the same whatever `size` is.

    `level` = operators in an expression (from 2 on, two of the terms may stand in parentheses), `digits` = the longest
    operand, `operators` out of `+-*`. `size` bounds the train split, `test_size` the test split; small spaces give less.
    """

    split: str = "train"
    level: int = 1
    digits: int = 2
    operators: str = "+-*"
    size: int = 20_000
    test_size: int = 500

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise ConfigError(f"calculator_math has the splits train and test, not {self.split!r}.")
        if not self.operators or len(set(self.operators)) < len(self.operators) or set(self.operators) - set("+-*"):
            raise ConfigError(f"--env.opt operators={self.operators}: give each of + - * at most once.")
        if not (1 <= self.level <= 6 and 1 <= self.digits <= 9 and self.size >= 1 and self.test_size >= 1):
            raise ConfigError("calculator_math: level is 1 to 6, digits 1 to 9, size and test_size at least 1.")

    @property
    def _space(self) -> int:
        """How many expressions there are."""
        shapes = 1 if self.level == 1 else self.level + 1
        return shapes * len(self.operators) ** self.level * (10**self.digits) ** (self.level + 1)

    @property
    def _tested(self) -> int:
        return min(self.test_size, max(1, int(self._space * MAX_SHARE_TESTED)))

    @property
    def _trained(self) -> int:
        return min(self.size, self._space - self._tested)

    def __len__(self) -> int:
        return self._tested if self.split == "test" else self._trained

    def at(self, position: int) -> Task:
        drawn = _draw(self._space, self._tested, self._trained)
        expression = self._expression(drawn[position if self.split == "test" else self._tested + position])
        label = int(evaluate(expression))
        return Task(
            f"{self.split}-{position}", f"{expression}=?", label, row={"expression": expression, "answer": label}
        )

    def _expression(self, number: int) -> str:
        """The expression with this number: mixed radix over operands, operators, and where the parentheses stand."""
        terms, signs = [], []
        for _ in range(self.level + 1):
            number, operand = divmod(number, 10**self.digits)
            terms.append(str(operand))
        for _ in range(self.level):
            number, sign = divmod(number, len(self.operators))
            signs.append(self.operators[sign])
        if number < self.level and self.level > 1:
            terms[number] = f"({terms[number]}"
            terms[number + 1] = f"{terms[number + 1]})"
        return terms[0] + "".join(sign + term for sign, term in zip(signs, terms[1:], strict=True))


@functools.lru_cache(maxsize=8)
def _draw(space: int, tested: int, trained: int) -> tuple[int, ...]:
    """Distinct numbers below `space`: `tested` of them that depend on nothing else, then `trained` others."""
    drawn: dict[int, None] = {}
    for total, draw in ((tested, random.Random(0)), (tested + trained, random.Random(1))):
        while len(drawn) < total:
            drawn[draw.randrange(space)] = None
    return tuple(drawn)


class CalculatorMath(ToolEnv):
    """Integer arithmetic with a calculator tool.

    Reward 1 when the last number of the answer is the value of the expression, else 0; the calculator may be skipped.

    Metrics: `correct`, `used_tool` (the calculator gave a value at least once).
    """

    max_turns = 4

    def __init__(
        self, level: int = 1, digits: int = 2, operators: str = "+-*", size: int = 20_000, test_size: int = 500
    ) -> None:
        super().__init__()
        CalculatorTasks("train", level, digits, operators, size, test_size)

    @classmethod
    def tasks(  # type: ignore[override]
        cls,
        split: str = "train",
        level: int = 1,
        digits: int = 2,
        operators: str = "+-*",
        size: int = 20_000,
        test_size: int = 500,
    ) -> CalculatorTasks:
        """See `CalculatorTasks`. The defaults (`17*23`) suit a model of half a million parameters."""
        return CalculatorTasks(split, level, digits, operators, size, test_size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self.metrics["used_tool"] = 0.0
        return observation, info

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic."""
        value = written(evaluate(expression))
        self.metrics["used_tool"] = 1.0
        return value

    def reward(self, answer: Action) -> dict[str, Any]:
        correct = not answer.tool_calls and last_number(answer) == self.task.label
        return {"reward": float(correct), "score": float(correct), "metrics": {"correct": correct}}


def last_number(text: str) -> float | int | None:
    """The last number written in a text: `1,234`, `-5`, `−5` and `391.0` are read; the `-` of `17-5` is no sign.

    None when there is none, or when it has more than MAX_NUMBER characters.
    """
    found = _NUMBER.findall(text.replace("−", "-"))
    if not found or len(found[-1]) > MAX_NUMBER:
        return None
    digits = found[-1].replace(",", "")
    return float(digits) if "." in digits else int(digits)
