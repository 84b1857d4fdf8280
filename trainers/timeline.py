"""The decisions of each rollout, laid end to end.

Time is counted in trained tokens: an observation, a padding slot and a change of row are all crossed without a step.
So rows [B, T] are packed to decisions [R, L] (R rollouts, L = most trained tokens in one), the recursions run there,
and the result goes back to the slots it came from. A slot that is not trained is never read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def dense_index(ids: Iterable[object] | Tensor | None, rows: int, *, device: torch.device) -> Tensor:
    """int64[rows]: ids numbered 0, 1, … in order of first appearance; None = every row has an id of its own."""
    if ids is None:
        return torch.arange(rows, device=device)
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(listed) != rows:
        raise ValueError(f"{len(listed)} ids for {rows} rows")
    number: dict[object, int] = {}
    return torch.tensor([number.setdefault(name, len(number)) for name in listed], dtype=torch.int64, device=device)


class Timeline:
    """Where the trained tokens of a batch stand, and in which order each rollout took them.

    mask bool[B, T]. The rows of a rollout follow each other in the order of the batch. `rollout` int64[B] = index of
    each row's rollout, `lengths` int64[R], `trained` bool[R, L], `last_row` int64[R] = the row of the last trained
    token (meaningless where length is 0).
    """

    def __init__(self, mask: Tensor, rollout_ids: Iterable[object] | Tensor | None = None) -> None:
        self.rollout = dense_index(rollout_ids, len(mask), device=mask.device)
        rollouts = int(self.rollout.max()) + 1 if len(mask) else 0
        row, column = mask.nonzero(as_tuple=True)
        if bool((self.rollout[1:] < self.rollout[:-1]).any()):  # rows of different rollouts are mixed
            order = torch.argsort(self.rollout[row], stable=True)
            row, column = row[order], column[order]
        self._row, self._column = row, column
        self.owner = self.rollout[row]
        self.lengths = torch.bincount(self.owner, minlength=rollouts)
        ends = self.lengths.cumsum(0)
        self._place = torch.arange(len(self._row), device=mask.device) - (ends - self.lengths)[self.owner]
        width = int(self.lengths.max()) if rollouts else 0
        self.trained = torch.arange(width, device=mask.device) < self.lengths[:, None]
        self.last_row = torch.zeros_like(self.lengths)
        self.last_row[self.lengths > 0] = self._row[ends[self.lengths > 0] - 1]
        self._shape = mask.shape

    def pack(self, rows: Tensor) -> Tensor:
        """[B, T] -> float32[R, L]; 0 right of each rollout's last decision."""
        packed = torch.zeros(self.trained.shape, dtype=torch.float32, device=self.trained.device)
        packed[self.owner, self._place] = rows[self._row, self._column].float()
        return packed

    def flat(self, packed: Tensor) -> Tensor:
        """[R, L] -> [N]: one value for each trained token, the rollouts end to end. `owner` int64[N] tells whose it is."""
        return packed[self.owner, self._place]

    def unpack(self, flat: Tensor) -> Tensor:
        """[N] as of `flat` -> [B, T]; 0 at slots that are not trained."""
        rows = torch.zeros(self._shape, dtype=flat.dtype, device=flat.device)
        rows[self._row, self._column] = flat
        return rows

    def once(self, values: Tensor, *, what: str) -> Tensor:
        """[B] -> [R], for a value that every row of a rollout repeats. Raises ValueError where two rows disagree."""
        rows = torch.arange(len(values), device=values.device)
        first = torch.zeros_like(self.lengths).scatter_reduce(0, self.rollout, rows, "amin", include_self=False)
        chosen = values[first]
        repeated = chosen[self.rollout]
        same = (values == repeated) | (values.isnan() & repeated.isnan())
        if not bool(same.all()):
            row = int((~same).nonzero()[0])
            raise ValueError(f"the rows of a rollout disagree on {what}: row {row} has {values[row].item()}")
        return chosen
