"""Arithmetic read from a screenshot, over several turns.

The page shows an expression and an input box. A wrong answer comes back as a new screenshot, crossed out and with a
hint; a reply that is no number comes back as a line of text. Levels run from a page of 6 x 4 patches that a policy of
under a million parameters learns, to cluttered 448-pixel pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Env, Task
from agentrl.errors import DataError
from agentrl.messages import Image, Observation, Text

from .screenshot_math_options import resolve
from .screenshot_math_page import Attempt, draw_page
from .screenshot_math_problem import Tasks, direction, evaluate, read_answer, turn_reward

MALFORMED = "Reply with one whole number."
Step = tuple[Observation, float, bool, bool, dict[str, Any]]


class ScreenshotMath(Env):
    """Arithmetic read from a screenshot, over several turns.

    Options, all by keyword: `level` (tiny | easy | medium | full), and any field of `Settings` on top of it.

    A right answer at turn t earns 0.5 ** (t - 1), anything else 0. The episode terminates with the right answer or
    when `max_turns` turns are used (the smaller of the option and `options["max_turns"]` of `reset`). `info["score"]`
    is 1 when the first reply was right, else 0; `info["metrics"]` holds `solved` (0 | 1) and `turns` used.

    A task's row needs `expression`; `seed` (the page's look) and the task's label have defaults: the env's own
    randomness, and the expression's value.
    """

    def __init__(self, **options: Any) -> None:
        self.settings = resolve(options)
        self.max_turns = self.settings.max_turns

    @classmethod
    def tasks(cls, split: str = "train", **options: Any) -> Sequence[Task]:
        """`train` or `test`: no numbers stand in the same order in both. The label is the answer, an int."""
        return Tasks(split, resolve(options))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        row = self.task.row
        if not isinstance(row.get("expression"), str):
            raise DataError(f"screenshot_math: task {self.task.id!r} has no text `expression` in its row")
        self._expression = row["expression"]
        self._label = evaluate(self._expression) if self.task.label is None else int(self.task.label)
        self._look = int(row["seed"]) if "seed" in row else int(self.np_random.integers(2**31))
        given = (options or {}).get("max_turns")
        self._limit = self.settings.max_turns if given is None else min(self.settings.max_turns, given)
        self._turn = 0
        self._attempts: tuple[Attempt, ...] = ()
        prompt = [Text(self.settings.prompt)] if self.settings.prompt else []
        return [self._page(), *prompt], self._sampling()

    def step(self, action: Any) -> Step:
        self._turn += 1
        answer = read_answer(str(action))
        if answer == self._label:
            return "", turn_reward(self._turn), True, False, self._info(solved=True)
        if answer is not None:
            self._attempts = (*self._attempts, Attempt(answer, direction(answer, self._label)))
        if self._turn >= self._limit:
            return "", 0.0, True, False, self._info(solved=False)
        return self._feedback(answer), 0.0, False, False, self._info(solved=False)

    def _feedback(self, answer: int | None) -> Observation:
        if answer is None:
            return MALFORMED
        return [self._page(), Text(self._attempts[-1].hint)]

    def _page(self) -> Image:
        return Image(draw_page(self.settings, self._expression, self._look, self._attempts))

    def _sampling(self) -> dict[str, Any]:
        bound = self.settings.reply_tokens
        return {"sampling": {"max_new_tokens": bound}} if bound else {}

    def _info(self, *, solved: bool) -> dict[str, Any]:
        return {
            **self._sampling(),
            "score": float(solved and self._turn == 1),
            "metrics": {"solved": float(solved), "turns": float(self._turn)},
        }
