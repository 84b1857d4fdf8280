"""The trainer's state on disk: DeepSpeed's own checkpoint, and beside it what each rank counts and draws from."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..config import LoraSection
from ..errors import DataError
from .backend import Backend
from .models import TEXT

TAG = "trainer"
"""The checkpoint's folder of the trainer."""
_ABOUT = "policy.json"
UNIVERSAL = "universal"
"""The file that marks a checkpoint for any number of ranks."""
_SAME = {
    "dtype": "--model.dtype",
    "stage": "--parallel.zero-stage",
    "optimizer": "--optim.name",
    "freeze_vision": "--model.freeze-vision",
}
"""What decides which optimizer states there are, and the flag that says it. In bfloat16 there is no stage 0, so dtype is first.
"""


@dataclass
class Counters:
    """updates = planned updates passed, made or not; bad_steps = steps with one that was skipped for a number that is not
    finite; version = published; kl_coef = the controller's coefficient.
    """

    updates: int = 0
    bad_steps: int = 0
    version: int = 0
    kl_coef: float | None = None


@dataclass(frozen=True)
class About:
    """What a checkpoint was written of: enough to export it without the run. `lora` = LoraSection as a dict;
    `freeze_vision` = what reads pictures was not adapted; `head` = TEXT or SCORE; `config` = what the run found out and
    config.json is to hold; `chat_template` = the run's, where it is not the model's; "" = none was used.
    """

    model: str
    trust_remote_code: bool
    dtype: str
    stage: int
    lora: dict[str, Any]
    head: str = TEXT
    optimizer: str = "adamw"
    freeze_vision: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def adapted(self) -> bool:
        """Whether only adapters are in the checkpoint."""
        return LoraSection(**self.lora).enabled

    @classmethod
    def read(cls, folder: Path) -> About:
        """Of the checkpoint in `folder`. Raises DataError when there is none."""
        file = folder / TAG / _ABOUT
        if not file.is_file():
            raise DataError(f"{folder} holds no trainer state")
        with whole(folder):
            return cls(**json.loads(file.read_text()))


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """Raises DataError in the place of whatever else reading a checkpoint raises, as of one that is damaged."""
    try:
        yield
    except (RuntimeError, EOFError, ValueError, TypeError, KeyError, OSError, pickle.UnpicklingError) as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise DataError(
            f"{folder} cannot be loaded: {type(error).__name__}: {first} Where a file in it is damaged, --resume PATH "
            "goes on from another checkpoint."
        ) from error


def save_state(backend: Backend, counters: Counters, about: About, folder: Path) -> None:
    """Write `folder/trainer`: weights (of adapters alone where there are any), optimizer, counters, and each rank's random
    state. All ranks together.
    """
    backend.engine.save_checkpoint(
        str(folder),
        tag=TAG,
        client_state={"counters": asdict(counters)},
        save_latest=False,
        exclude_frozen_parameters=about.adapted,
    )
    torch.save(_random_state(), _rank_file(folder))
    if dist.get_rank() == 0:
        (folder / TAG / _ABOUT).write_text(json.dumps(asdict(about)))


def load_state(backend: Backend, about: About, folder: Path) -> Counters:
    """Restore what `save_state` wrote. Raises DataError: nothing there, or written by another number of ranks (unless the
    checkpoint is a universal one), with another of `_SAME`, or with other adapters.
    """
    ranks, universal = dist.get_world_size(), (folder / TAG / UNIVERSAL).is_file()
    if not universal and (not _rank_file(folder).is_file() or _rank_file(folder, ranks).is_file()):
        raise DataError(
            f"{folder} holds no trainer state of {ranks} rank(s); `agentrl ckpt universal {folder} OUT` makes one for any "
            "number of ranks"
        )
    stored = About.read(folder)
    for name, flag in _SAME.items():
        was, now = getattr(stored, name), getattr(about, name)
        if was != now:
            raise DataError(f"{folder} was written with {flag} {was}, not {now}")
    if stored.lora != about.lora:
        raise DataError(f"{folder} was written with other --lora options: {stored.lora}, not {about.lora}")
    with whole(folder), backend.loading(universal and stored.stage > 0):
        path, state = backend.engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not about.adapted)
    if path is None:
        raise DataError(f"{folder} holds no trainer state that DeepSpeed can read")
    if not universal:
        with whole(folder):
            _restore_random_state(torch.load(_rank_file(folder), weights_only=False))
    return Counters(**state["counters"])


def _rank_file(folder: Path, rank: int | None = None) -> Path:
    return folder / TAG / f"random_rank_{dist.get_rank() if rank is None else rank}.pt"


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
