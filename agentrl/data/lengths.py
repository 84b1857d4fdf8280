"""Which prompts are short enough: counted as they are rendered, with system text, tools and expanded images."""

from __future__ import annotations

from collections.abc import Callable

from ..env import Task
from ..renderer import Renderer
from ..single_turn import opening


def fits(renderer: Renderer, limit: int) -> Callable[[Task], bool]:
    """Whether a task's prompt has at most `limit` tokens. Raises DataError for one that cannot be rendered.

    No token stands for less than a byte of text, so that most prompts need not be tokenised to know.
    """
    around = len(renderer.start([{"role": "user", "content": "x"}]))

    def short(task: Task) -> bool:
        prompt = task.prompt
        plain = isinstance(prompt, str) and not task.images and not task.tools
        if plain and around + len(str(prompt).encode(errors="replace")) <= limit:
            return True
        messages = opening(task)
        return not renderer.exceeds(messages, limit) and len(renderer.start(messages, task.tools)) <= limit

    return short
