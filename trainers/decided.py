"""What a batch's losses need, settled before the first of its updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decided:
    """The trained tokens of B rows, left-aligned to width L: `slots` and `mask` bool[B, L], the rest float32[B, L].

    `slots` = there is a token; `mask` = and it is in the loss. `weights` = share of each token in the update's loss, before its
    denominator: 1, or 1 / trained tokens of its rollout. None = no loss of this run reads it: `old_logp` (proximal policy at
    the start of the batch), `ref_logp` (a KL in the loss), `returns` and `old_values` (a critic).
    """

    slots: Tensor
    mask: Tensor
    advantages: Tensor
    rollout_logp: Tensor
    weights: Tensor
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None

    def select(self, rows: Sequence[int]) -> Decided:
        """The same for some of the rows, no wider than they need."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.mask.device)
        width = int(self.slots[index].sum(1).max()) if len(rows) else 0
        return self._each(lambda table: table[index, :width])

    def to(self, device: torch.device) -> Decided:
        """The same on another device."""
        return self._each(lambda table: table.to(device))

    def share(self, rows: Sequence[int], counted: bool, device: torch.device) -> Decided:
        """What is decided of some rows, on a device. Not counted: nothing of it is trained, in a forward and backward pass
        that only keeps the ranks in step.
        """
        decided = self.select(rows)
        return (decided if counted else replace(decided, mask=torch.zeros_like(decided.mask))).to(device)

    def bad(self, output: Tensor) -> Tensor:
        """bool[B]: rows with a number at a trained slot that is not finite, in the module's output or in what a loss reads."""
        bad = self.mask & ~output.detach().isfinite()
        for field in fields(self):
            table = getattr(self, field.name)
            if table is not None:
                bad |= self.mask & ~table.float().isfinite()
        return bad.any(1)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Decided:
        tables = {field.name: getattr(self, field.name) for field in fields(self)}
        return Decided(**{name: None if table is None else change(table) for name, table in tables.items()})
