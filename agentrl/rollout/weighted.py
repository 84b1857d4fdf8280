"""A weighted choice among many, whose weights change one at a time: both cost the square root of how many there are."""

from __future__ import annotations

import math

import numpy as np


class Weighted:
    """`n` weights >= 0, all `first` at the beginning, in blocks of about sqrt(n) whose sums are kept."""

    def __init__(self, n: int, first: float) -> None:
        self._size = max(1, math.isqrt(n))
        blocks = -(-n // self._size)
        self._weights = np.zeros((blocks, self._size))
        self._weights.flat[:n] = first
        self._sums = self._weights.sum(axis=1)

    def set(self, index: int, weight: float) -> None:
        block, place = divmod(index, self._size)
        self._weights[block, place] = weight
        self._sums[block] = self._weights[block].sum()

    def at(self, share: float) -> int | None:
        """The index at a share, 0 <= share < 1, of the whole weight, so one of weight 0 never; None when all are 0."""
        if not self._sums.any():
            return None
        block, rest = _reached(self._sums, share * float(self._sums.sum()))
        place, _ = _reached(self._weights[block], rest)
        return block * self._size + place


def _reached(weights: np.ndarray, point: float) -> tuple[int, float]:
    """(the place in which `point` along the weights lies, how far in it). Rounding never leads beyond the last that has one."""
    edges = weights.cumsum()
    last = int(np.flatnonzero(weights)[-1])
    place = min(int(np.searchsorted(edges, point, side="right")), last)
    return place, point - float(edges[place - 1] if place else 0.0)
