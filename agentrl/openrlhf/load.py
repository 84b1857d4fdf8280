"""Loading such files: `openrlhf.utils` is ours while one loads, unless the real package is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .. import registry
from ..errors import ConfigError

_lock = threading.RLock()


def load_file(path: str) -> ModuleType:
    """As `registry.load_file`, with the stand-in in place. Raises ConfigError."""
    with stand_in():
        return registry.load_file(path)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Inside, what such files import from `openrlhf.utils` does; afterwards it is gone again."""
    with _lock:
        if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
            yield
            return
        modules = _modules()
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)


def _modules() -> dict[str, ModuleType]:
    from . import agent, math_answers

    package, utils = ModuleType("openrlhf"), ModuleType("openrlhf.utils")
    speaking = ModuleType("openrlhf.utils.logging_utils")
    speaking.init_logger = logging.getLogger  # type: ignore[attr-defined]
    package.__path__, utils.__path__ = [], []
    parts = {"agent": agent, "logging_utils": speaking, "math_utils": math_answers}
    package.utils = utils  # type: ignore[attr-defined]
    for name in ("extract_boxed_answer", "grade_answer"):
        setattr(utils, name, getattr(math_answers, name))
    for name, part in parts.items():
        setattr(utils, name, part)
    return {
        "openrlhf": package,
        "openrlhf.utils": utils,
        **{f"{utils.__name__}.{name}": part for name, part in parts.items()},
    }


def is_file(spec: str) -> bool:
    """Whether a name is a file alone, which only files of this format may be."""
    return spec.endswith(".py")


def agent_executor(path: str) -> Any:
    """The agent of a file: its `AgentExecutor`, or its `AgentInstance` in the stock turn loop. Raises ConfigError."""
    from .agent import MultiTurnAgentExecutor

    module = load_file(path)
    if hasattr(module, "AgentExecutor"):
        return _made(path, module.AgentExecutor)
    if hasattr(module, "AgentInstance"):
        return MultiTurnAgentExecutor(module.AgentInstance)
    raise ConfigError(
        f"--agent {path} defines neither AgentExecutor nor AgentInstance, as agent files of OpenRLHF do; name what it defines, "
        f"as in {path}:NAME."
    )


def _made(path: str, executor: Any) -> Any:
    try:
        with stand_in():
            return executor() if isinstance(executor, type) else executor
    except Exception as error:
        raise ConfigError(f"--agent {path}: AgentExecutor() raised {type(error).__name__}: {error}") from error


def reward_function(path: str) -> Callable[..., Any]:
    """The `reward_func(queries, prompts, labels)` of a file, as a function for one completion. Raises ConfigError."""
    from .values import logs, number

    module = load_file(path)
    if not callable(getattr(module, "reward_func", None)):
        raise ConfigError(f"--reward {path} defines no reward_func: name its function, as in {path}:NAME.")
    function = module.reward_func

    def reward_func(query: str, prompt_text: str, label: Any) -> dict[str, Any]:
        found = function([query], [prompt_text], [label])
        if not isinstance(found, dict):
            return {"reward": number(found, "a reward")}
        score = found.get("scores")
        verdict = {"reward": number(found.get("rewards"), "rewards"), "metrics": logs(found.get("extra_logs"))}
        return verdict if score is None else {**verdict, "score": number(score, "scores")}

    return reward_func
