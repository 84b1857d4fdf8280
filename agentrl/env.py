"""The environment contract: `Task`, `Env`, and the spaces of chat.

A sync `Env` is a full gymnasium environment. `reset` gives the conversation so far, `step` takes the model's action and
gives what comes next, the reward of that turn (None = no verdict) and whether the episode is over.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium
from gymnasium import spaces

from .messages import Action, Image, Message, Observation, normalize
from .registry import accepted_options

MAX_DRAWN_TASKS = 10_000


@dataclass(frozen=True)
class Task:
    """One thing to do. `row` is the whole dataset row, with the types it was stored with; `label` reaches the env unchanged.

    `env` says, in a run with several environments, which of them it is of; `tools` are OpenAI function schemas that the row
    brings.
    """

    id: str
    prompt: str | list[dict[str, Any]] | None = None
    label: Any = None
    images: tuple[Image, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    env: str = ""
    tools: tuple[dict[str, Any], ...] = ()


class ChatSpace(spaces.Space[Any]):
    """Any observation: a str, or a list of parts or messages."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str | list)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"message {int(self.np_random.integers(1000))}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ActionSpace(ChatSpace):
    """Any reply of the model: a str (an `Action` is one)."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        return Action(str(int(self.np_random.integers(100))))


class Env(gymnasium.Env[Any, Any]):
    """Subclass this, write `reset` and `step` (plain or `async def`), and train on it.

    One instance plays one episode at a time and lives on one thread. `tasks` may return any iterable; a Sequence is
    drawn from without being read through. Options given with `--env.opt` reach the constructor and `tasks` by name.
    """

    max_turns: int = 16
    tools: list[dict[str, Any]] = []
    """OpenAI function schemas, given to the chat template."""
    metadata: dict[str, Any] = {"render_modes": []}
    task: Task
    options: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Env:
        env = super().__new__(cls)
        env.options = _given(cls, args, kwargs)
        env.observation_space = ChatSpace()
        env.action_space = ActionSpace()
        return env

    @classmethod
    def tasks(cls, split: str = "train", **options: Any) -> Iterable[Task]:
        """The tasks the env brings, in a fixed order. None by default: the data then comes from `--data.path`."""
        return ()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Sets `self.task`: `options["task"]`, else one of `tasks("train")` drawn by the seed, else `Task(id=str(seed))`.

        Call it first and return your own observation; this one is the task's prompt.
        """
        super().reset(seed=seed)
        given = (options or {}).get("task")
        self.task = given if given is not None else self._draw(seed)
        prompt = self.task.prompt
        return (cast(Observation, prompt) if prompt is not None else ""), {}

    def _draw(self, seed: int | None) -> Task:
        tasks = type(self).tasks("train", **accepted_options(type(self).tasks, self.options))
        if not isinstance(tasks, Sequence):
            tasks = list(itertools.islice(tasks, MAX_DRAWN_TASKS))
        if not tasks:
            return Task(id=str(seed))
        return cast(Task, tasks[int(self.np_random.integers(len(tasks)))])

    def step(self, action: Any) -> Any:
        """-> (observation, reward: float | None, terminated, truncated, info). See docs/environments.md for `info`."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def close(self) -> None:
        """Called at most once an episode, on the thread that made the env."""


def opening(task: Task) -> list[Message]:
    """The messages of a task: its prompt, with its images in front where the prompt is a plain string."""
    if isinstance(task.prompt, str) and task.images:
        return normalize([*map(Image, task.images), task.prompt])
    return normalize(task.prompt if task.prompt is not None else "")


def _given(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments by name; what does not fit its signature is left for the constructor to refuse."""
    if not args:
        return kwargs
    try:
        bound = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs)
    except TypeError:
        return kwargs
    names = list(inspect.signature(cls.__init__).parameters)[1 : len(args) + 1]
    return {**kwargs, **{name: bound.arguments[name] for name in names if name in bound.arguments}}
