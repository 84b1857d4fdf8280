"""The reference's log-probabilities of a run: computed once, and kept in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..config import DpoConfig
from .examples import Item, Pair, rows_of
from .loop import Trainer


async def give_references(trainer: Trainer, items: Sequence[Item], folder: Path, name: str, whose: str) -> None:
    """Set `reference` of every pair: from the run's folder where this reference was asked about these very pairs, else from
    the trainer, which must hold the weights it started with. `whose` = `reference_of` the run.
    """
    file = folder / "reference" / f"{name}-{_digest(items, whose)}.npy"
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


def reference_of(config: DpoConfig, model_path: str) -> str:
    """What tells a reference from others: the files of its folder and of the adapter it begins with, and its number type.
    A folder that was copied or written again is another one.
    """
    lora = [] if config.ref.path is not None or config.lora.path is None else [config.lora.path]
    parts = [config.ref.path or model_path, *lora]
    return repr([config.model.dtype, *((part, _files(Path(part))) for part in parts)])


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """(name, bytes, time of change) of each file; nothing for a hub id."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _digest(items: Sequence[Item], whose: str) -> str:
    digest = hashlib.sha256(whose.encode())
    for row in rows_of(items):
        digest.update(row.token_ids.tobytes() + b"|" + row.loss_mask.tobytes() + repr(row.images).encode())
    return digest.hexdigest()[:16]
