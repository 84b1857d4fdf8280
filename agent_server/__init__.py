"""Everything that listens on HTTP. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {"agent_app": "agent_kit"}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
