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
    run will count that.
    """

    opening: list[Message] | None
    tools: Sequence[dict[str, Any]] = ()
    max_turns: int | None = 1

    @property
    def images(self) -> int:
        return len(message_images(self.opening or []))


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
    held_out: Sequence[Task]
    found: Mapping[str, EnvFacts]

    @property
    def facts(self) -> EnvFacts:
        """What holds for a run with all of these environments: the most images, the most turns."""
        shown = max(self.found.values(), key=lambda facts: facts.images)
        turns = [facts.max_turns for facts in self.found.values()]
        return replace(shown, max_turns=None if None in turns else max(turn or 0 for turn in turns))


def look(config: Config) -> Look:
    """Look at environments, data and servers. Raises ConfigError or DataError, one paragraph each."""
    return asyncio.run(_look(config))


async def _look(config: Config) -> Look:
    if config.engine.name == "vllm":
        check_vllm_names(config)
    make_executor(config)
    await check_servers(config)
    tasks: dict[str, Iterable[Task]] = {}
    found: dict[str, EnvFacts] = {}
    for spec, name in config.env.labels.items() or (("", "data"),):
        first, tasks[name] = _peek(make_tasks(config, "train", spec), config, spec)
        found[name] = await first_opening(config, first, spec)
    return Look(config, tasks, held_out_tasks(config) if config.eval.enable else [], found)


def make_ready(looked: Look, model_path: str) -> Ready:
    """Everything that can be known of a run with this model without loading its weights. Raises ConfigError."""
    config, facts = looked.config, looked.facts
    shape = model_config(model_path)
    if facts.images and not takes_images(shape):
        raise ConfigError(
            f"{config.env.shown or config.data.path} shows images, and {model_path} is a text model "
            f"({shape.get('model_type', 'unknown type')}). Pass an image model with --model."
        )
    limits = _within_model(episode_limits(config, facts.max_turns), shape, config)
    renderer = make_renderer(config, model_path)
    for own in looked.found.values():
        _check_opening(renderer, own, limits)
    stop_ids = tuple(sorted({*renderer.stop_ids, *renderer.placeholder_ids}))
    return Ready(config, model_path, looked.tasks, looked.held_out, facts, limits, stop_ids)


def held_out_tasks(config: Config) -> list[Task]:
    """The first `eval.tasks` tasks of each environment's evaluation split."""
    held_out: list[Task] = []
    for spec, name in config.env.labels.items() or (("", ""),):
        tasks = itertools.islice(make_tasks(config, config.eval.split, spec), config.eval.tasks)
        held_out += [replace(task, env=name) if len(config.env.name) > 1 else task for task in tasks]
    return held_out


def _peek(tasks: Iterable[Task], config: Config, env: str) -> tuple[Sequence[Task], Iterable[Task]]:
    """(the first LOOKS tasks, all of them, the first still included)."""
    if isinstance(tasks, Sequence) and len(tasks):
        return tasks[:LOOKS], tasks
    stream = iter(tasks)
    first = list(itertools.islice(stream, LOOKS))
    if first:
        return first, itertools.chain(first, stream)
    if not env or config.data.path is not None:
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
        return EnvFacts(opening(task), max_turns=None)
    if not config.env.name:
        return EnvFacts(opening(task))
    source = EnvSource(config, name=env)
    session = EnvSession(source.make, config.rollout.call_timeout_s, source.name, EnvLoops())
    try:
        async with session:
            observation, _ = await session.reset(0, {"task": task, "max_turns": config.rollout.max_turns})
            tools = await session.attribute("tools", ()) or ()
            turns = await session.attribute("max_turns", None)
            return EnvFacts(normalize(observation), tools, None if turns is None else whole_number("max_turns", turns))
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
