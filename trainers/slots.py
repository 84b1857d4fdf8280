"""The trained tokens of rows as a table [B, L]: slot i of row b is its i-th trained token, left-aligned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..trajectory import Row


def trained_mask(rows: Sequence[Row]) -> Tensor:
    """bool[B, L]: slot i is row b's i-th trained token."""
    counts = torch.tensor([np.count_nonzero(row.loss_mask) for row in rows], dtype=torch.long)
    return torch.arange(int(counts.max()) if len(rows) else 0) < counts[:, None]


def at_slots(
    parts: Sequence[NDArray[np.float32] | NDArray[np.int32]], rows: Sequence[Row], mask: Tensor | None = None
) -> Tensor:
    """An array over the tokens of each row -> [B, L]; 0 beyond a row's end. `mask` = trained_mask(rows) where it is known."""
    if not rows:
        return torch.zeros(0, 0)
    mask = trained_mask(rows) if mask is None else mask
    values = np.concatenate([part[row.loss_mask] for part, row in zip(parts, rows, strict=True)])
    return torch.zeros(mask.shape, dtype=torch.from_numpy(values).dtype).masked_scatter_(mask, torch.from_numpy(values))


def aligned(parts: Sequence[Tensor]) -> Tensor:
    """One value for each trained token of each row -> [B, L], 0 beyond a row's end."""
    return pad_sequence(list(parts), batch_first=True) if parts else torch.zeros(0, 0)


def rollout_ids(rows: Sequence[Row]) -> list[str]:
    """The rollout of each row; a row without one is a rollout of its own."""
    return [row.rollout_id or f"row {i}" for i, row in enumerate(rows)]


def rollout_sums(rows: Sequence[Row], values: Sequence[float]) -> Tensor:
    """The sum of a value of each row over its rollout: float32[B]."""
    totals: dict[str, float] = {}
    ids = rollout_ids(rows)
    for rollout, value in zip(ids, values, strict=True):
        totals[rollout] = totals.get(rollout, 0.0) + value
    return torch.tensor([totals[rollout] for rollout in ids])


def last_slots(rows: Sequence[Row], mask: Tensor) -> Tensor:
    """bool[B, L]: the last trained token of each rollout."""
    owner = {
        rollout: i for i, (rollout, row) in enumerate(zip(rollout_ids(rows), rows, strict=True)) if row.loss_mask.any()
    }
    last = torch.zeros_like(mask)
    for i in owner.values():
        last[i, np.count_nonzero(rows[i].loss_mask) - 1] = True
    return last


def spread(table: Tensor, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    """[B, L] back onto the tokens of each row: float32[T], 0 where nothing is trained."""
    spread_rows = []
    for row, values in zip(rows, table.numpy(), strict=True):
        full = np.zeros(len(row), np.float32)
        full[row.loss_mask] = values[: np.count_nonzero(row.loss_mask)]
        spread_rows.append(full)
    return spread_rows
