"""What can be said about an environment without a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..assemble import EnvSource
from ..config import Config
from ..env import Task
from ..env_loop import EnvLoops
from ..env_session import EnvSession
from ..errors import AgentRLError
from ..messages import Message, normalize
from ..registry import lookup

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Opening:
    """An environment after its first reset."""

    env: Any
    task: Task | None
    messages: list[Message]
    max_turns: int | None
    tools: Sequence[dict[str, Any]]


def summary(env: Any) -> str:
    """First line of the docstring."""
    return docstring(env).partition("\n")[0]


def docstring(env: Any) -> str:
    """The docstring of a class or factory; its parents' is not taken for it."""
    return inspect.cleandoc(env.__doc__ or "").strip()


def listed(name: str) -> tuple[str, str]:
    """(one line about it, split sizes) of a registered env. The fault boundary of listing: a broken env says so itself."""
    try:
        env = lookup("env", name)
        source = EnvSource(Config.model_validate({"env": {"name": name}}))
        return summary(env), ", ".join(f"{split} {size(source, split)}" for split in SPLITS)
    except AgentRLError as error:
        return f"broken: {error}", ""
    except Exception as error:
        return f"does not import: {type(error).__name__}: {error}", ""


def size(source: EnvSource, split: str) -> str:
    """How many tasks a split has: a number, 'a stream' where only reading it would tell, 'none'."""
    tasks = source.tasks(split)
    if isinstance(tasks, Sequence):
        return str(len(tasks)) if tasks else "none"
    return "a stream"


def first_task(source: EnvSource) -> Task | None:
    """The first training task; None where the env brings none."""
    return next(iter(source.tasks("train")), None)


async def open_env(source: EnvSource, timeout_s: float) -> Opening:
    """Make the env and reset it with seed 0. Raises EnvError, also when a call takes longer than `timeout_s`."""
    task = first_task(source)
    async with EnvSession(source.make, timeout_s, source.name, EnvLoops()) as session:
        observation, _ = await session.reset(0, {} if task is None else {"task": task}, busy_s=timeout_s)
        return Opening(
            await session.attribute("unwrapped", None),
            await session.attribute("task", task),
            normalize(observation),
            await session.attribute("max_turns", None),
            (await session.attribute("tools", ())) or (),
        )


def options(target: Any, env: Any) -> list[str]:
    """`name = default` of every option: the constructor's parameters, and for an env that takes any and keeps them in a
    dataclass `settings`, its fields.
    """
    parameters = inspect.signature(target).parameters.values()
    named = [_option(p.name, p.default, p.empty) for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    settings = vars(env).get("settings") if hasattr(env, "__dict__") else None
    if not named and dataclasses.is_dataclass(settings):
        fields = dataclasses.fields(settings)
        named = [_option(field.name, vars(settings)[field.name], dataclasses.MISSING) for field in fields]
    return named


def _option(name: str, default: Any, missing: Any) -> str:
    return name if default is missing else f"{name} = {default!r}"
