"""What the loop asks of a trainer. `agentrl.trainers` implements it on DeepSpeed; tests implement it in a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .trajectory import Row


@dataclass
class TrainReport:
    """What one batch did. `updated` is False for a batch without signal: no update, no new version.

    `advantages[i]` is float32 [T] for row i of the batch, 0 where nothing is trained; `metrics` are final values, already
    reduced over micro-batches, updates and ranks.
    """

    updated: bool
    metrics: dict[str, float] = field(default_factory=dict)
    advantages: list[NDArray[np.float32]] = field(default_factory=list)


class Trainer(Protocol):
    """Computes gradients. One call at a time; every call is awaited by the loop under the watchdog."""

    async def train(self, rows: list[Row], step: int) -> TrainReport:
        """Advantages over the whole batch, then its planned updates. Rows of one rollout stand together, in order."""
        ...

    async def publish(self, version: int) -> Any:
        """A copy of the current weights, ready for `Engine.update_weights(source, version)`; freed by `release`."""
        ...

    async def send(self, source: Any) -> None:
        """Take part in the transfer while the engines load; asked for with the transport nccl alone."""
        ...

    async def release(self, source: Any) -> None:
        """Every engine has taken `source`."""
        ...

    async def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and random state into an existing folder."""
        ...

    async def load(self, folder: Path) -> None:
        """The state that `save` wrote."""
        ...

    async def export(self, folder: Path) -> None:
        """A Hugging Face folder that `from_pretrained` loads, tokenizer and processor included."""
        ...

    async def offload(self) -> None:
        """Move everything from the device to CPU memory. Only `onload`, `release` and `close` may follow."""
        ...

    async def onload(self) -> None:
        """Bring it back."""
        ...

    async def close(self) -> None:
        """End the trainer's processes."""
        ...
