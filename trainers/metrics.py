"""Numbers to log, carried as sums so that they do not depend on how a batch was cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """total / count. Means of micro-batches and ranks are merged by adding totals and counts, never averaged."""

    total: float
    count: float

    @property
    def value(self) -> float:
        return self.total / self.count


def measure(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Mean]:
    """The mean of each [B, T] (or [B]) tensor over the slots where mask is true; no key at all when none is.

    One transfer from the device for all of them.
    """
    sums = [torch.where(mask, value.detach().float(), 0.0).sum() for value in values.values()]
    *totals, count = torch.stack([*sums, mask.sum().float()]).tolist()
    return {name: Mean(total, count) for name, total in zip(values, totals, strict=True)} if count else {}


def merge(parts: Iterable[Mapping[str, Mean]]) -> dict[str, Mean]:
    """Sums and counts added over micro-batches or ranks. A key that some parts lack is merged over those that have it."""
    merged: dict[str, Mean] = {}
    for part in parts:
        for name, mean in part.items():
            before = merged.get(name, Mean(0.0, 0.0))
            merged[name] = Mean(before.total + mean.total, before.count + mean.count)
    return merged


def averages(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The numbers to log. A metric with count 0 is left out, not logged as 0 or NaN."""
    return {name: mean.value for name, mean in metrics.items() if mean.count}
