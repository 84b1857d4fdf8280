"""Algorithms from outside: a user's file, or an installed package that names them in `agentrl.algorithms`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ..registry import load_file, load_object, lookup, names


def from_outside(name: str) -> Any:
    """What `path/to/file.py:NAME` or the entry point of a name refers to; None when it is neither.

    A file is loaded once a process, and its decorators run then. Raises ConfigError when it does not import or lacks
    the name.
    """
    if ".py:" in name:
        return load_object(name, _once)
    return lookup("algorithm", name) if name in names("algorithm") else None


def _once(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    return _load(file) if file.is_file() else load_file(path)


@cache
def _load(file: Path) -> ModuleType:
    return load_file(str(file))
