"""The reference's log-probabilities of a run: computed once, and kept in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .examples import Item, Pair, rows_of
from .loop import Trainer


async def give_references(trainer: Trainer, items: Sequence[Item], folder: Path, name: str) -> None:
    """Set `reference` of every pair: from the run's folder where these very pairs are there, else from the trainer, which
    must hold the weights it started with.
    """
    file = folder / "reference" / f"{name}-{_digest(items)}.npy"
    if file.is_file():
        sums: list[float] = np.load(file).tolist()
    else:
        sums = await trainer.reference(list(items))
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npy")
        np.save(part, np.array(sums, np.float64))
        part.replace(file)
    for item, chosen, rejected in zip(items, sums[::2], sums[1::2], strict=True):
        assert isinstance(item, Pair)
        item.reference = (chosen, rejected)


def _digest(items: Sequence[Item]) -> str:
    digest = hashlib.sha256()
    for row in rows_of(items):
        digest.update(row.token_ids.tobytes() + b"|" + row.loss_mask.tobytes() + repr(row.images).encode())
    return digest.hexdigest()[:16]
