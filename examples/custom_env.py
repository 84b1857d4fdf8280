"""An environment of your own: guess the number, with a hint after every wrong guess.

    agentrl train --env examples/custom_env.py:GuessTheNumber --env.opt high=20 --algo reinforce_pp --model.path MODEL

`reset` says what the model reads first, `step` takes what it wrote and says what comes next. Both may be `async def`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from agentrl import Action, Env, Task


class GuessTheNumber(Env):
    """A right guess earns 1, less for every turn it took; what is no number earns -0.1."""

    max_turns = 6

    def __init__(self, high: int = 20) -> None:
        self.high = high

    @classmethod
    def tasks(cls, split: str = "train", high: int = 20) -> Iterable[Task]:
        """Every number is a task; the odd ones are held out."""
        wanted = 0 if split == "train" else 1
        return [Task(id=str(n), label=n) for n in range(1, high + 1) if n % 2 == wanted]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.turn = 0
        return f"I think of a number from 1 to {self.high}. What is it?", {}

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        found = re.search(r"\d+", action)
        if found is None:
            return "Say a number.", -0.1, False, False, {"metrics": {"no_number": 1}}
        guess, label = int(found.group()[:9]), self.task.label
        if guess == label:
            return "", 1 - 0.1 * (self.turn - 1), True, False, {"score": 1.0, "metrics": {"turns": self.turn}}
        return "Higher." if guess < label else "Lower.", 0.0, False, False, {"score": 0.0}
