"""What is found out about a run before any model loads, so that mistakes cost seconds."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .assemble import EnvSource, check_servers, episode_limits, make_executor, make_renderer, make_tasks
from .config import Config
from .data import RowTasks
from .data.lengths import fits
from .engine import Limits
from .engines.vllm_names import check_vllm_names
from .env import Task, opening
from .env_loop import EnvLoops
from .env_session import EnvSession
from .errors import ConfigError, DataError, EnvError
from .messages import Message, message_images, normalize
from .model_folder import max_positions, model_config, takes_images
from .renderer import Renderer
from .step_info import whole_number

LOOKS = 8
"""Tasks that are tried until the env opens on one."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvFacts:
    """What the first episode of a run, or of one of its environments, looks like. `opening` is None when the env failed: the
    run will count that. `images` = pictures in one opening, at most.
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
    """A run that may start: its model, the tasks of each environment by name, limits, and the ids that end a turn (a sampled
    image placeholder does).
    """

    config: Config
    model_path: str
    tasks: Mapping[str, Iterable[Task]]
    held_out: Sequence[Task]
    facts: EnvFacts
    limits: Limits
    stop_ids: tuple[int, ...]

    @property
    def total(self) -> int | None:
        """Tasks of all environments, which are the draws of one pass; None where they have no end."""
        counts = [len(tasks) if isinstance(tasks, Sequence) else None for tasks in self.tasks.values()]
        return sum(count or 0 for count in counts) if None not in counts else None

    @property
    def max_images(self) -> int:
        """Most images in one context, for the engine's limit: what the opening holds, again in every turn; one a turn where
        it holds none, as later turns may. 0 for a text model.
        """
        looks = takes_images(model_config(self.model_path))
        return self.limits.max_turns * max(1, self.facts.images) if looks else 0


@dataclass(frozen=True)
class Look:
    """What a run plays, looked at before there is a model or a cluster: tasks and facts by environment."""

    config: Config
    tasks: Mapping[str, Iterable[Task]]
    held_out: Mapping[str, Iterable[Task]]
    found: Mapping[str, EnvFacts]

    @property
    def facts(self) -> EnvFacts:
        """What holds for a run with all of these environments: the most images, the most turns."""
        shown = max(self.found.values(), key=lambda facts: facts.images)
        turns = [facts.max_turns for facts in self.found.values()]
        return replace(shown, max_turns=None if None in turns else max(turn or 0 for turn in turns))


def look(config: Config) -> Look:
    """Look at environments, data and servers. Raises ConfigError or DataError, one paragraph each.

    What takes long without waiting, as reading a dataset does, runs on no event loop: the first Ctrl-C ends it.
    """
    check_vllm_names(config)
    make_executor(config)
    asyncio.run(check_servers(config))
    tasks: dict[str, Iterable[Task]] = {}
    found: dict[str, EnvFacts] = {}
    held_out = held_out_tasks(config) if config.eval.enable else {}
    for spec, name in config.env.labels.items() or (("", "data"),):
        first, tasks[name] = _peek(make_tasks(config, "train", spec), config, spec)
        facts = asyncio.run(first_opening(config, first, spec))
        found[name] = _with_most_images(facts, tasks[name], held_out.get(name, ()))
    return Look(config, tasks, held_out, found)


def make_ready(looked: Look, model_path: str) -> Ready:
    """Everything that can be known of a run with this model without loading its weights. Raises ConfigError."""
    config, facts = looked.config, looked.facts
    shape = model_config(model_path)
    if facts.images and not takes_images(shape):
        raise ConfigError(
            f"{config.env.shown or ', '.join(config.data.path)} shows images, and {model_path} is a text model "
            f"({shape.get('model_type', 'unknown type')}). Pass an image model with --model."
        )
    limits = _within_model(episode_limits(config, facts.max_turns), shape, config)
    renderer = make_renderer(config, model_path)
    tasks, held_out = dict(looked.tasks), dict(looked.held_out)
    if not config.env.name and not config.agent.name:
        for some in (tasks, held_out):
            some.update({name: _short(of_one, renderer, limits, config) for name, of_one in some.items()})
    else:
        for own in looked.found.values():
            _check_opening(renderer, own, limits)
    stop_ids = tuple(sorted({*renderer.stop_ids, *renderer.placeholder_ids}))
    evaluated = evaluated_tasks(held_out, config)
    return Ready(config, model_path, tasks, evaluated, facts, limits, stop_ids)


def held_out_tasks(config: Config) -> dict[str, Iterable[Task]]:
    """The tasks of each environment's evaluation split, or of the dataset's."""
    envs = config.env.labels.items() or (("", "data"),)
    return {name: make_tasks(config, config.eval.split, spec) for spec, name in envs}


def evaluated_tasks(held_out: Mapping[str, Iterable[Task]], config: Config) -> list[Task]:
    """The first `eval.tasks` of each environment, or of each dataset."""
    several = len(config.env.name) > 1
    return [
        replace(task, env=name) if several else task
        for name, tasks in held_out.items()
        for of_one in (tasks.by_dataset() if isinstance(tasks, RowTasks) else [tasks])
        for task in itertools.islice(of_one, config.eval.tasks)
    ]


def _with_most_images(facts: EnvFacts, *tasks: Iterable[Task]) -> EnvFacts:
    """The facts with as many images as the row has that has most."""
    most = [some.max_images for some in tasks if isinstance(some, RowTasks)]
    return replace(facts, images=max([facts.images, *most]))


def _short(tasks: Iterable[Task], renderer: Renderer, limits: Limits, config: Config) -> Iterable[Task]:
    """The tasks whose prompt leaves room for a reply."""
    if not isinstance(tasks, RowTasks):
        return tasks
    most = config.data.max_prompt_len or limits.max_len - 1
    return tasks.keep(fits(renderer, most), f"longer than {most} tokens")


def _peek(tasks: Iterable[Task], config: Config, env: str) -> tuple[Sequence[Task], Iterable[Task]]:
    """(the first LOOKS tasks, all of them, the first still included)."""
    if isinstance(tasks, Sequence) and len(tasks):
        return tasks[:LOOKS], tasks
    stream = iter(tasks)
    first = list(itertools.islice(stream, LOOKS))
    if first:
        return first, itertools.chain(first, stream)
    if not env or config.data.path:
        raise ConfigError("Say what to train on: --env NAME, or --data.path FILE with --reward path.py:function.")
    raise ConfigError(f"{env} brings no tasks for split 'train': give some, or pass --data.path FILE.")


async def first_opening(config: Config, tasks: Sequence[Task], env: str | None = None) -> EnvFacts:
    """What the first of the tasks that opens looks like; none is tried after the time that one call may take."""
    until = time.monotonic() + config.rollout.call_timeout_s
    for task in tasks:
        facts = await probe(config, task, env)
        if facts.opening is not None or time.monotonic() > until:
            break
    return facts


async def probe(config: Config, task: Task, env: str | None = None) -> EnvFacts:
    """Reset an env (the first, when none is named) on its first task and look. One that fails here is left to the run, which
    counts failures.
    """
    if config.agent.name:
        return EnvFacts.of(opening(task), task.tools, max_turns=None)
    if not config.env.name:
        return EnvFacts.of(opening(task), task.tools)
    source = EnvSource(config, name=env)
    session = EnvSession(source.make, config.rollout.call_timeout_s, source.name, EnvLoops())
    try:
        async with session:
            options = {"task": task, "max_turns": config.rollout.max_turns}
            observation, _ = await session.reset(0, options, busy_s=config.rollout.call_timeout_s)
            tools = await session.attribute("tools", ()) or ()
            turns = await session.attribute("max_turns", None)
            limit = None if turns is None else whole_number("max_turns", turns)
            return EnvFacts.of(normalize(observation), tools, limit)
    except (EnvError, DataError) as error:
        log.warning("%s failed on its first task: %s", source.name, error)
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
