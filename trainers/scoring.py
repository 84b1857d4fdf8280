"""What models say of a batch before any of its updates: the work is shared by the ranks, the answers are known to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trajectory import Row
from .backend import gather
from .batch import MicroBatch
from .slots import aligned

Read = Callable[[Sequence[Row]], Sequence[Sequence[Tensor]]]
"""Rows -> outputs, each one tensor a row over its trained tokens."""


@dataclass(frozen=True)
class Scores:
    """[B, L] over trained tokens; None = not needed. 0 in rows that are not trained.

    logp = proximal policy: the weights at the start of the batch, or what the engine reported where that stands for them;
    at the rollout temperature, as are ref_logp and teacher_logp. values = V(state
    before the token), bootstrap[B] = V(state after the row's last trained token), 0 unless the rollout was cut short and
    goes on in the critic's eyes.
    """

    logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None

    def suspects(self) -> list[int]:
        """Rows with a score that is not finite."""
        tables = [table for table in (self.logp, self.ref_logp, self.teacher_logp, self.values) if table is not None]
        return sorted({row for table in tables for row in (~table.isfinite()).any(1).nonzero()[:, 0].tolist()})


@dataclass(frozen=True)
class Share:
    """The rows that a rank looks at, micro-batch by micro-batch; every rank has as many."""

    rows: Sequence[Row]
    steps: Sequence[Sequence[MicroBatch]]
    rank: int

    @torch.no_grad()
    def evaluate(self, read: Read, outputs: int = 1) -> list[Tensor]:
        """The outputs of `read` for the rows of all ranks: [B, L] float32 on the CPU. Every rank must call it.

        A rank with nothing to do reads the shortest row, to keep its collectives in step with the others'.
        """
        found: dict[int, tuple[Tensor, ...]] = {}
        filler = (min((i for step in self.steps for batch in step for i in batch), key=lambda i: len(self.rows[i])),)
        for step in self.steps:
            batch = step[self.rank]
            tables = read([self.rows[i] for i in batch or filler])
            by_row = zip(*([value.float().cpu() for value in table] for table in tables), strict=True)
            found |= dict(zip(batch, by_row, strict=False))
        every = {i: values for part in gather(found) for i, values in part.items()}
        missing = [torch.zeros(int(row.loss_mask.sum())) for row in self.rows]
        return [
            aligned([every[i][which] if i in every else missing[i] for i in range(len(self.rows))])
            for which in range(outputs)
        ]
