"""What is found out about a run before any model loads, so that mistakes cost seconds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .assemble import EnvSource, check_servers, episode_limits, make_executor, make_renderer, make_tasks
from .config import Config
from .data import RowTasks
from .data.lengths import fits
from .engine import Limits
from .env import Task
from .env_session import EnvSession
from .errors import ConfigError, DataError, EnvError
from .messages import Message, message_images, normalize
from .model_folder import max_positions, model_config, takes_images
from .renderer import Renderer
from .single_turn import opening
from .step_info import whole_number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvFacts:
    """What the first episode of a run looks like. `opening` is None when the env failed: the run will count that.
    `images` = pictures in one opening, at most.
    """

    opening: list[Message] | None
    tools: Sequence[dict[str, Any]] = ()
    max_turns: int | None = 1
    images: int = 0

    @classmethod
    def of(cls, opening: list[Message], tools: Sequence[dict[str, Any]] = (), max_turns: int | None = 1) -> EnvFacts:
        return cls(opening, tools, max_turns, len(message_images(opening)))


@dataclass(frozen=True)
class Ready:
    """A run that may start: its model, tasks, limits, and the ids that end a turn (a sampled image placeholder does)."""

    config: Config
    model_path: str
    tasks: Iterable[Task]
    held_out: Sequence[Task]
    facts: EnvFacts
    limits: Limits
    stop_ids: tuple[int, ...]

    @property
    def total(self) -> int | None:
        """Tasks in one pass; None where they have no end."""
        return len(self.tasks) if isinstance(self.tasks, Sequence) else None

    @property
    def max_images(self) -> int:
        """Most images in one context, for the engine's limit: what the opening holds, again in every turn; one a turn where
        it holds none, as later turns may. 0 for a text model.
        """
        looks = takes_images(model_config(self.model_path))
        return self.limits.max_turns * max(1, self.facts.images) if looks else 0


async def preflight(config: Config, choose_model: Callable[[EnvFacts], str]) -> Ready:
    """Everything that can be known without loading weights. Raises ConfigError or DataError, one paragraph each."""
    make_executor(config)
    await check_servers(config)
    tasks = make_tasks(config, "train")
    held_out = make_tasks(config, config.eval.split) if config.eval.enable else ()
    first, tasks = _peek(tasks, config)
    facts = _with_most_images(await probe(config, first), tasks, held_out)
    model_path = choose_model(facts)
    shape = model_config(model_path)
    if facts.images and not takes_images(shape):
        raise ConfigError(
            f"{config.env.name or ', '.join(config.data.path)} shows images, and {model_path} is a text model "
            f"({shape.get('model_type', 'unknown type')}). Pass an image model with --model."
        )
    limits = _within_model(episode_limits(config, facts.max_turns), shape, config)
    renderer = make_renderer(config, model_path)
    if config.env.name is None and not config.agent.name:
        tasks, held_out = (_short(some, renderer, limits, config) for some in (tasks, held_out))
    else:
        _check_opening(renderer, facts, limits)
    evaluated = _first_of_each(held_out, config.eval.tasks)
    stop_ids = tuple(sorted({*renderer.stop_ids, *renderer.placeholder_ids}))
    return Ready(config, model_path, tasks, evaluated, facts, limits, stop_ids)


def _with_most_images(facts: EnvFacts, *tasks: Iterable[Task]) -> EnvFacts:
    """The facts with as many images as the row has that has most."""
    most = [some.max_images for some in tasks if isinstance(some, RowTasks)]
    return replace(facts, images=max([facts.images, *most]))


def _first_of_each(tasks: Iterable[Task], n: int) -> list[Task]:
    """The first n tasks, of several datasets those of each."""
    sets = tasks.by_dataset() if isinstance(tasks, RowTasks) else [tasks]
    return [task for some in sets for task in itertools.islice(some, n)]


def _short(tasks: Iterable[Task], renderer: Renderer, limits: Limits, config: Config) -> Iterable[Task]:
    """The tasks whose prompt leaves room for a reply."""
    if not isinstance(tasks, RowTasks):
        return tasks
    most = config.data.max_prompt_len or limits.max_len - 1
    return tasks.keep(fits(renderer, most), f"longer than {most} tokens")


def _peek(tasks: Iterable[Task], config: Config) -> tuple[Task, Iterable[Task]]:
    """(the first task, all of them, the first still included)."""
    if isinstance(tasks, Sequence):
        if len(tasks):
            return tasks[0], tasks
    else:
        stream = iter(tasks)
        for first in stream:
            return first, itertools.chain([first], stream)
    if config.env.name is None or config.data.path:
        raise ConfigError("Say what to train on: --env NAME, or --data.path FILE with --reward path.py:function.")
    raise ConfigError(f"{config.env.name} brings no tasks for split 'train': define tasks(), or pass --data.path FILE.")


async def probe(config: Config, task: Task) -> EnvFacts:
    """Reset one env on the first task and look. An env that fails here is left to the run, which counts failures."""
    if config.agent.name:
        return EnvFacts.of(opening(task), task.tools, max_turns=None)
    if config.env.name is None:
        return EnvFacts.of(opening(task), task.tools)
    session = EnvSession(EnvSource(config).make, config.rollout.call_timeout_s, config.env.name)
    try:
        async with session:
            observation, _ = await session.reset(0, {"task": task, "max_turns": config.rollout.max_turns})
            tools = await session.attribute("tools", ()) or ()
            turns = await session.attribute("max_turns", None)
            limit = None if turns is None else whole_number("max_turns", turns)
            return EnvFacts.of(normalize(observation), tools, limit)
    except (EnvError, DataError) as error:
        log.warning("the environment failed on its first task: %s", error)
        return EnvFacts(None, (), None)


def _within_model(limits: Limits, shape: dict[str, Any], config: Config) -> Limits:
    """max_len no longer than the model was made for; an explicit longer one is an error."""
    longest = max_positions(shape)
    if longest is None or limits.max_len <= longest:
        return limits
    if "max_len" in config.rollout.changed():
        raise ConfigError(f"--rollout.max-len {limits.max_len}: the model takes at most {longest} tokens.")
    return Limits(**{**vars(limits), "max_len": longest})


def _check_opening(renderer: Renderer, facts: EnvFacts, limits: Limits) -> None:
    if facts.opening is None:
        return
    if renderer.exceeds(facts.opening, limits.max_len):
        raise ConfigError(f"the first prompt is far longer than --rollout.max-len {limits.max_len} tokens.")
    prompt = renderer.start(facts.opening, facts.tools)
    if len(prompt) >= limits.max_len:
        raise ConfigError(
            f"the first prompt takes {len(prompt)} tokens, --rollout.max-len {limits.max_len} leaves no room for a reply."
        )
