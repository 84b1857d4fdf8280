"""Supervised warm start of the tiny policies on demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.torchvision_ops import ensure_torchvision_imports

Progress = Callable[[str, float], None]


def warm_started(
    kind: str, *, seed: int = 0, progress: Progress | None = None, max_steps: int | None = None
) -> tuple[Any, Any]:
    """(model, processor or tokenizer) of a kind."""
    ensure_torchvision_imports()
    from .models import build

    return build(kind, seed)
