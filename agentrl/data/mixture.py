"""Several datasets as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..seeds import derive


def mixed(
    numbers: Sequence[NDArray[np.int64]], probs: Sequence[float], seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(dataset, row number) of each position. Without `probs` one dataset after the other; with them each position's dataset
    is drawn anew, until every one with a probability above 0 has been passed over at least once: small ones repeat from
    their start, nothing is cut off.
    """
    if not probs:
        which = np.repeat(np.arange(len(numbers), dtype=np.int32), [len(rows) for rows in numbers])
        return which, np.concatenate(numbers)
    which = _drawn([len(rows) for rows in numbers], np.asarray(probs) / sum(probs), seed)
    chosen = np.empty(len(which), np.int64)
    for source, rows in enumerate(numbers):
        mine = np.flatnonzero(which == source)
        chosen[mine] = rows[np.arange(len(mine)) % len(rows)]
    return which, chosen


def _drawn(sizes: Sequence[int], probs: NDArray[np.float64], seed: int) -> NDArray[np.int32]:
    """Draws of datasets up to the one that completes the last first pass."""
    generator = np.random.default_rng(derive(seed, "mixture"))
    drawn = np.empty(0, np.int32)
    while True:
        more = generator.choice(len(sizes), size=max(1024, sum(sizes)), p=probs).astype(np.int32)
        drawn = np.concatenate([drawn, more])
        places = [np.flatnonzero(drawn == source) for source in range(len(sizes))]
        needed = [source for source in range(len(sizes)) if probs[source] > 0]
        if all(len(places[source]) >= sizes[source] for source in needed):
            return drawn[: 1 + max(int(places[source][sizes[source] - 1]) for source in needed)]
