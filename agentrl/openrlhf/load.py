"""Loading such files: what they import from `openrlhf.utils` is ours, unless the real package is installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

from .. import registry
from ..errors import ConfigError
from ..torchvision_ops import ensure_torchvision_imports

PACKAGES = ("openrlhf", "openrlhf.utils")
MODULES = (*PACKAGES, "openrlhf.utils.agent", "openrlhf.utils.logging_utils", "openrlhf.utils.math_utils")
GRADING = ("extract_boxed_answer", "grade_answer")
FILE = "__openrlhf__"
"""What marks the globals of a file that was loaded here."""
_lock = threading.RLock()


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: asked for what nobody else has. It answers code of such files, and what that calls or what loads or
    runs them, and nobody else: to the rest of the process openrlhf is not there.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES or _is_installed() or not _asked_by_a_file():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        from . import agent, math_answers

        grading = {name: getattr(math_answers, name) for name in GRADING}
        held: dict[str, dict[str, Any]] = {
            "openrlhf.utils": grading,
            "openrlhf.utils.math_utils": grading,
            "openrlhf.utils.agent": {name: getattr(agent, name) for name in agent.__all__},
            "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
        }
        vars(module).update(held.get(module.__name__, {}))


def _is_installed() -> bool:
    """Whether the package in use is a real one, which is then not added to; a folder of that name is none."""
    package = sys.modules.get("openrlhf")
    loader = getattr(package, "__loader__", None)
    return package is not None and not isinstance(loader, StandIn | importlib.machinery.NamespaceLoader)


def _asked_by_a_file() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if FILE in frame.f_globals or frame.f_globals.get("__package__") == __package__:
            return True
        frame = frame.f_back
    return False


def load_file(path: str) -> ModuleType:
    """As `registry.load_file`; what the file imports from `openrlhf.utils` is ours, now and when its functions run. No module
    of that name stays behind in `sys.modules`. Raises ConfigError.
    """
    with _lock:
        if not any(isinstance(finder, StandIn) for finder in sys.meta_path):
            sys.meta_path.append(StandIn())
        there = set(sys.modules)
        try:
            module = registry.load_file(path)
        finally:
            for name in MODULES:
                if name not in there and isinstance(getattr(sys.modules.get(name), "__loader__", None), StandIn):
                    del sys.modules[name]
    vars(module)[FILE] = True
    return module


def is_file(spec: str) -> bool:
    """Whether a name is a file alone, which only files of this format may be."""
    return spec.endswith(".py")


def agent_executor(path: str) -> Any:
    """The agent of a file: its `AgentExecutor`, which may be one of ours, or its `AgentInstance` in the stock turn loop. Raises
    ConfigError.
    """
    from .agent import MultiTurnAgentExecutor

    ensure_torchvision_imports()  # agent files import vLLM
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
