"""The optimizer updates of one module on one batch: the walk through the micro-batches, which all losses share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import Backend, gather
from .batch import MicroBatch, Update
from .metrics import Mean, averages, merge

Parts = dict[str, Mean]


class LossShare(NamedTuple):
    """What some rows have in an update: their part of its loss, the module's output that it was computed from, metrics, and
    which of the rows hold a number that is not finite (bool[B]).
    """

    loss: Tensor
    output: Tensor
    metrics: Parts
    bad: Tensor


LossOf = Callable[[MicroBatch, bool], LossShare]
"""Rows -> their share; False = without weight, for a pass that only keeps the ranks in step."""


class Updates:
    """Makes a module's updates and keeps what they showed. `lengths` = tokens of each row.

    An update whose loss or gradient is not finite anywhere is made by no rank; its metrics are dropped.
    """

    def __init__(self, backend: Backend, rank: int, lengths: Sequence[int]) -> None:
        self._backend = backend
        self._rank = rank
        self._lengths = lengths
        self._parts: list[Parts] = []
        self._suspects: set[int] = set()

    def make(self, update: Update, lr: float, loss_of: LossOf) -> float:
        """Add up the gradients of this rank's micro-batches and step; the gradient's norm. Not finite: no step was made.

        A rank with nothing to do computes its shortest row without weight, to keep its collectives in step with the
        others'.
        """
        parts: list[Parts] = []
        filler = (min(update.rows, key=self._lengths.__getitem__),)
        for i, step in enumerate(update.steps):
            rows = step[self._rank] or filler
            share = loss_of(rows, bool(step[self._rank]))
            self._suspects |= {row for row, found in zip(rows, share.bad.tolist(), strict=True) if found}
            parts += [share.metrics, {"loss": Mean(float(share.loss.detach()), 0.0)}]
            self._backend.backward(_contagious(share.loss, share.output), last=i == len(update.steps) - 1)
        norm = self._backend.step(lr)
        if math.isfinite(norm):
            own = [{"grad_norm": Mean(norm, 1.0), "loss": Mean(0.0, 1.0)}] if self._rank == 0 else []
            self._parts += parts + own
        return norm

    def averages(self, more: Sequence[Parts] = ()) -> dict[str, float]:
        """Sums and counts over micro-batches and ranks, then divided; `more` from elsewhere. Every rank must ask."""
        return averages(merge(gather(merge([*self._parts, *more]))))

    def suspects(self) -> list[int]:
        """Rows with a number that is not finite at a token in the loss, in the updates so far. Every rank must ask."""
        return sorted({row for rows in gather(self._suspects) for row in rows})


def _contagious(loss: Tensor, output: Tensor) -> Tensor:
    """A loss that is not finite sends NaN to every weight, so that all ranks see it in the gradient's norm.

    By itself it may not: a clamp makes a gradient of 0 of it, and the update would be made as if nothing had happened.
    """
    return loss if bool(torch.isfinite(loss.detach())) else output.sum() * torch.nan
