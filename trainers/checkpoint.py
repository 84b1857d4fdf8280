"""The trainer's state on disk: DeepSpeed's own checkpoint, and beside it what each rank counts and draws from."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import DataError
from .backend import Backend

_TAG = "trainer"


@dataclass
class Counters:
    """updates = planned updates passed, made or not; bad_steps = those skipped for a number that is not finite; version =
    published; kl_coef = the controller's coefficient.
    """

    updates: int = 0
    bad_steps: int = 0
    version: int = 0
    kl_coef: float | None = None


def save_state(backend: Backend, counters: Counters, folder: Path) -> None:
    """Write `folder/trainer`: weights, optimizer, counters, and each rank's random state. All ranks together."""
    backend.engine.save_checkpoint(
        str(folder), tag=_TAG, client_state={"counters": asdict(counters)}, save_latest=False
    )
    torch.save(_random_state(), _rank_file(folder))


def load_state(backend: Backend, folder: Path) -> Counters:
    """Restore what `save_state` wrote. Raises DataError: nothing there, or written by another number of ranks."""
    if not _rank_file(folder).is_file() or _rank_file(folder, dist.get_world_size()).is_file():
        raise DataError(f"{folder} holds no trainer state of {dist.get_world_size()} rank(s)")
    path, state = backend.engine.load_checkpoint(str(folder), tag=_TAG)
    if path is None:
        raise DataError(f"{folder} holds no trainer state that DeepSpeed can read")
    _restore_random_state(torch.load(_rank_file(folder), weights_only=False))
    return Counters(**state["counters"])


def _rank_file(folder: Path, rank: int | None = None) -> Path:
    return folder / _TAG / f"random_rank_{dist.get_rank() if rank is None else rank}.pt"


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
