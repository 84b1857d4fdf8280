"""Making a tiny policy: build, warm-start, save; and the cache where the result lives between runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.registry import suggest

KINDS = ("tiny-vlm", "tiny-text")
Progress = Callable[[str, float], None]


def tiny_path(kind: str, *, seed: int = 1) -> Path:
    """Where the policy is cached: `$XDG_CACHE_HOME or ~/.cache`/agentrl/KIND-HASH. The folder may not exist yet.

    The hash covers the source of the recipe (this package), so a changed recipe makes a new policy.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "agentrl" / f"{_known(kind)}-{_recipe_hash(seed)}"


def cached_tiny(kind: str, *, seed: int = 1, progress: Progress | None = None) -> Path:
    """The cached policy's folder, made first when it is missing (about a minute on one core)."""
    path = tiny_path(kind, seed=seed)
    return path if (path / "config.json").is_file() else make_tiny(kind, path, seed=seed, progress=progress)


def make_tiny(
    kind: str, out: Path, *, seed: int = 1, progress: Progress | None = None, max_steps: int | None = None
) -> Path:
    """Build and warm-start `tiny-vlm` or `tiny-text`, and save model and processor in the new folder `out`.

    `out` appears whole or not at all; when another process made it meanwhile, that one stays. `progress` gets a
    stage's name and a share of 0..1. `max_steps` bounds the warm start (0 = the initialised policy). Runs on one
    thread, leaves torch's thread count and random state as they were, and gives the same weights every time on one
    machine. The default seed is one that learns soon (about 75 s for tiny-vlm, 35 s for tiny-text, on one core; others
    up to twice that). Raises ConfigError for an unknown kind.
    """
    from .warm_start import warm_started

    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    model, processor = warm_started(_known(kind), seed=seed, progress=progress, max_steps=max_steps)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        whole = Path(folder) / "whole"
        _save(model, processor, whole)
        _place(whole, out)
    return out


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ConfigError(f"There is no tiny model {kind!r}.{suggest(kind, KINDS)} Known: {', '.join(KINDS)}.")
    return kind


def _recipe_hash(seed: int) -> str:
    recipe = hashlib.sha256(str(seed).encode())
    for file in sorted(Path(__file__).parent.glob("*")):
        if file.suffix in (".py", ".jinja"):
            recipe.update(file.read_bytes())
    return recipe.hexdigest()[:12]


def _save(model: Any, processor: Any, folder: Path) -> None:
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


def _place(whole: Path, out: Path) -> None:
    try:
        whole.rename(out)
    except OSError:
        if not (out / "config.json").is_file():
            raise ConfigError(f"{out} exists and is no model folder: remove it or choose another.") from None
        shutil.rmtree(whole)
