"""One batch on its way through the critic's updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..trajectory import Row
from .batch import MicroBatch, Update
from .critic import Critic
from .decided import Decided
from .losses import value_loss
from .slots import aligned
from .updating import LossShare, Updates

_NAMES = {
    "loss": "critic/loss",
    "grad_norm": "critic/grad_norm",
    "value_mean": "critic/value",
    "return_mean": "critic/return",
    "value_error": "critic/error",
    "value_clip_fraction": "critic/clip_fraction",
}
"""Metrics of the parts -> names in the report. Means over trained tokens; loss and grad_norm: over updates made."""


class CriticPass:
    """The critic's updates of one batch: the rows and micro-batches are the policy's."""

    who = "critic"

    def __init__(self, critic: Critic, rows: Sequence[Row], decided: Decided, rank: int) -> None:
        self._critic = critic
        self._rows = rows
        self._decided = decided
        self._updates = Updates(critic.backend, rank, [len(row) for row in rows])

    def make(self, update: Update, index: int) -> float:
        """Planned update `index`, its denominator known before the first backward; the gradient's norm.

        Not finite: the step was not made.
        """
        denominator = float(self._decided.select(update.rows).mask.sum())
        rate = self._critic.rate(index)
        return self._updates.make(update, rate, lambda rows, counted: self._loss(rows, counted, denominator))

    def suspects(self) -> list[int]:
        """See Updates.suspects."""
        return self._updates.suspects()

    def metrics(self) -> dict[str, float]:
        """See Updates.averages. Every rank must ask."""
        report = {_NAMES[name]: value for name, value in self._updates.averages().items()}
        return report | self._explained()

    def _loss(self, rows: MicroBatch, counted: bool, denominator: float) -> LossShare:
        decided = self._decided.share(rows, counted, self._critic.device)
        assert decided.returns is not None
        values = aligned(self._critic.values([self._rows[row] for row in rows])[0])
        loss, metrics = value_loss(
            values,
            decided.old_values,
            decided.returns,
            decided.mask,
            clip=self._critic.value_clip,
            denominator=denominator,
        )
        return LossShare(loss, values, metrics, decided.bad(values))

    def _explained(self) -> dict[str, float]:
        """1 - var(G - V) / var(G) over trained tokens, of the values that the advantages were made with."""
        decided = self._decided
        assert decided.returns is not None and decided.old_values is not None
        returns, values = decided.returns[decided.mask], decided.old_values[decided.mask]
        if len(returns) < 2 or float(returns.max() - returns.min()) == 0:
            return {}
        explained = 1.0 - float((returns - values).var(correction=0) / returns.var(correction=0))
        return {"critic/explained_variance": explained} if math.isfinite(explained) else {}
