"""agentrl trains language and vision-language models as agents.

Everything a user subclasses or calls is importable from here; names load on first use, so `import agentrl` is cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

from .gymnasium_hook import install

__version__ = "0.1.0"

_EXPORTS = {
    "errors": (
        "AgentError",
        "AgentRLError",
        "ConfigError",
        "DataError",
        "EngineError",
        "EnvError",
        "InfrastructureError",
        "RunStoppedError",
    ),
    "messages": ("Action", "Image", "Message", "Observation", "Text", "ToolCall"),
    "env": ("ActionSpace", "ChatSpace", "Env", "Task"),
    "env_sync": ("sync",),
    "tool_env": ("ToolEnv", "tool"),
    "engine": ("Engine", "Generation", "GenerationRequest", "Health", "Limits", "Sampling", "Span"),
    "engines.scripted": ("Reply", "ScriptedEngine"),
    "trajectory": ("Node", "Row", "Trajectory"),
    "renderer": ("Prompt", "Renderer"),
    "executor": ("AgentExecutorBase", "RolloutContext", "run_episode"),
    "multi_turn": ("MultiTurnExecutor",),
    "single_turn": ("SingleTurnExecutor",),
    "registry": ("register",),
    "agent_server.executors": ("FunctionExecutor", "RemoteAgentExecutor"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)


install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
