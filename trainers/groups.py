"""Statistics over the members of a group: the rollouts of one task that have a verdict."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """index int64[R] = group of each rollout; member bool[R] = counts in its group's statistics.

    Every method answers per rollout, float64[R], in which no float32 reward is too large to be squared or added: the
    statistic of the rollout's own group. Values of non-members are never read; what a non-member is answered is finite and
    without meaning.
    """

    def __init__(self, index: Tensor, member: Tensor) -> None:
        self._index = index
        self._member = member
        self._groups = int(index.max()) + 1 if len(index) else 0

    def count(self) -> Tensor:
        """Members in the group."""
        return self.total(torch.ones_like(self._index, dtype=torch.float64))

    def total(self, x: Tensor) -> Tensor:
        """Sum of x[R] over the members."""
        zeros = torch.zeros(self._groups, dtype=torch.float64, device=x.device)
        return zeros.index_add(0, self._index, torch.where(self._member, x.double(), 0.0))[self._index]

    def lowest(self, x: Tensor) -> Tensor:
        """Smallest x[R] of the members; 0 in a group without any."""
        high = torch.full((self._groups,), torch.inf, dtype=torch.float64, device=x.device)
        low = high.scatter_reduce(0, self._index, torch.where(self._member, x.double(), torch.inf), "amin")
        return torch.where(low.isinf(), 0.0, low)[self._index]

    def above_lowest(self, x: Tensor) -> Tensor:
        """x - min(group); 0 for non-members.

        Baselines are computed on this, not on x: equal rewards are then exactly 0 and so is all that follows, where a
        mean of equal values may miss them by a rounding.
        """
        return torch.where(self._member, x.double() - self.lowest(x), 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of x[R] over the members; exactly x where all members are equal."""
        return self.lowest(x) + self.total(self.above_lowest(x)) / self.count().clamp(min=1)
