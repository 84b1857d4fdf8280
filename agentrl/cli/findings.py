"""What `agentrl doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`missing` = a training run cannot work without it; `todo` says what to do about it."""

    level: Literal["ok", "note", "missing"]
    what: str
    todo: str = ""
