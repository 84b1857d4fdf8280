"""My environment: what the model is asked, and what it earns.

Try it:    agentrl envs check env_skeleton.py:MyEnv
           agentrl rollout --env env_skeleton.py:MyEnv --engine random
Train it:  agentrl train --env env_skeleton.py:MyEnv
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl import Env, Task


class MyEnv(Env):
    """Say a number that is larger than the one shown."""

    max_turns = 3

    def __init__(self, high: int = 8) -> None:
        self.high = high

    @classmethod
    def tasks(cls, split: str = "train", high: int = 8) -> Sequence[Task]:
        """Every split has tasks of its own; ids are unique."""
        shown = range(0, high, 2) if split == "train" else range(1, high, 2)
        return [Task(f"{split}-{n}", f"Say a number above {n}.", label=n) for n in shown]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)  # sets self.task
        self.turn = 0
        return str(self.task.prompt), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The action is the model's reply, a str; whatever it is, answer it and do not raise."""
        self.turn += 1
        reply = action.strip()
        solved = reply.isascii() and reply.isdigit() and len(reply) < 20 and int(reply) > self.task.label
        over = solved or self.turn >= self.max_turns
        return "Not above it. Try again.", float(solved), over, False, {"score": float(solved)}
