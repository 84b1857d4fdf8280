"""The reference's log-probabilities of a run: computed once, and kept in the run's folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config import DpoConfig
from ..errors import DataError
from ..loop import Reporter
from .examples import Examples, Item, Pair
from .loop import Trainer

AT_A_TIME = 1024
"""Pairs that the trainer is asked about in one call: they go through Ray's object store, and each rank has a table of them."""


@dataclass
class References:
    """What the reference says of `n` examples: summed log-probabilities of the chosen and the rejected answer, float64[n, 2];
    `marks`, uint64[n], tell which pair was asked about, 0 = none, as the row is no example.
    """

    sums: NDArray[np.float64]
    marks: NDArray[np.uint64]

    def give(self, number: int, item: Item) -> Item:
        """The pair with its answers. Raises DataError when it is another one than was asked about."""
        assert isinstance(item, Pair)
        if self.marks[number] != mark_of(item):
            raise DataError(
                f"{item.chosen.rollout_id.removesuffix('-chosen')} is not the pair that the reference was asked about: the "
                "data have changed since the run began."
            )
        item.reference = (float(self.sums[number, 0]), float(self.sums[number, 1]))
        return item


async def give_references(
    trainer: Trainer, examples: Examples, folder: Path, name: str, whose: str, reporter: Reporter
) -> None:
    """Set `references` of the examples: from the run's folder where this reference was asked about them, else from the
    trainer, which must hold the weights it started with. `whose` = `reference_of` the run.
    """
    file = folder / "reference" / f"{name}-{_digest(examples, whose)}.npz"
    if file.is_file():
        with np.load(file) as stored:
            examples.references = References(stored["sums"], stored["marks"])
        return
    known = await _asked(trainer, examples, reporter)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part.npz")
    np.savez(part, sums=known.sums, marks=known.marks)
    part.replace(file)
    examples.references = known


async def _asked(trainer: Trainer, examples: Examples, reporter: Reporter) -> References:
    """The answers to all pairs, some at a time."""
    count = len(examples)
    known = References(np.full((count, 2), np.nan), np.zeros(count, np.uint64))
    for start in range(0, count, AT_A_TIME):
        reporter.stage(f"log-probabilities of the reference, pair {start + 1} of {count}")
        numbers = range(start, min(start + AT_A_TIME, count))
        pairs = {number: item for number in numbers for item in examples.batch([number])}
        if pairs:
            sums = await trainer.reference(list(pairs.values()))
            known.sums[list(pairs)] = np.array(sums).reshape(-1, 2)
            known.marks[list(pairs)] = [mark_of(pair) for pair in pairs.values()]
    return known


def mark_of(item: Item) -> np.uint64:
    """What tells a pair from others: of its tokens, which are trained, and its pictures."""
    assert isinstance(item, Pair)
    digest = hashlib.blake2b(digest_size=8)
    for row in item.rows:
        digest.update(row.token_ids.tobytes() + b"|" + row.loss_mask.tobytes() + repr(row.images).encode())
    return np.uint64(int.from_bytes(digest.digest(), "big"))


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


def _digest(examples: Examples, whose: str) -> str:
    """Of whom is asked about what: all pairs, or the first ones of many, the others having marks."""
    digest = hashlib.sha256(f"{whose} {len(examples)}".encode())
    for item in examples.items:
        digest.update(mark_of(item).tobytes())
    return digest.hexdigest()[:16]
