"""How a batch is cut: into updates between rollouts, and each update into micro-batches. Pure functions of counts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

N = TypeVar("N", float, NDArray[np.float64])
MicroBatch = tuple[int, ...]
"""Indices of rows that go through one forward and backward pass together, ascending; () = a step with nothing to do."""

_MOST_TRIED = 32
"""Bins looked at for one row before an even spread is given up: a bound on planning time for batches that barely fit."""


@dataclass(frozen=True)
class Update:
    """One planned optimizer update. `steps[i][r]` = what rank r does in its i-th micro-step; every rank has as many.

    Each row of `rows` (ascending) occurs exactly once in the steps. An update without rows is planned but not made.
    """

    rows: tuple[int, ...]
    steps: tuple[tuple[MicroBatch, ...], ...]


def plan_updates(
    rollouts: Sequence[Hashable],
    lengths: Sequence[int],
    trained: Sequence[bool],
    *,
    updates: int = 1,
    epochs: int = 1,
    ranks: int = 1,
    budget: int,
    half_cost: float = math.inf,
) -> list[Update]:
    """updates * epochs updates of a batch, in order.

    Entry i of the sequences describes row i: its rollout, its tokens, whether anything in it is trained (other rows are left
    out); half_cost as in `attention_cost`. Raises ConfigError when one row alone has more tokens than the budget of a
    micro-batch.
    """
    for length, used in zip(lengths, trained, strict=True):
        if used and length > budget:
            raise ConfigError(
                f"A training row of {length} tokens does not fit --train.micro-batch-tokens {budget}: raise it, or lower "
                "--rollout.max-len."
            )
    cut = cut_rollouts(rollouts, trained, updates)
    planned = [
        Update(tuple(rows), micro_steps(rows, lengths, ranks=ranks, budget=budget, half_cost=half_cost)) for rows in cut
    ]
    return planned * epochs


def cut_rollouts(rollouts: Sequence[Hashable], trained: Sequence[bool], parts: int) -> list[list[int]]:
    """Rows of each part. Rollouts keep their order and stay whole; parts differ by at most one rollout."""
    used = [row for row, some in enumerate(trained) if some]
    number: dict[Hashable, int] = {}
    place = [number.setdefault(rollouts[row], len(number)) for row in used]
    edges = [len(number) * part // parts for part in range(parts + 1)]
    part_of = [part for part, (start, end) in enumerate(itertools.pairwise(edges)) for _ in range(start, end)]
    cut: list[list[int]] = [[] for _ in range(parts)]
    for row, rollout in zip(used, place, strict=True):
        cut[part_of[rollout]].append(row)
    return cut


def micro_steps(
    rows: Sequence[int], lengths: Sequence[int], *, ranks: int, budget: int, half_cost: float = math.inf
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Rows in as few steps as a first-fit packing needs, every micro-batch within the budget, cost spread evenly.

    Ranks wait for one another, so those of a step get micro-batches of like cost, and the dearer of them in turns.
    """
    ascending = sorted(rows)
    cost = attention_cost(np.array([lengths[row] for row in ascending], np.float64), half_cost)
    costs = dict(zip(ascending, cost.tolist(), strict=True))
    order = [ascending[i] for i in np.argsort(-cost, kind="stable").tolist()]  # of equals the first row first
    least = _first_fit(order, lengths, budget)
    count = -(-len(least) // ranks) * ranks
    bins = _spread(order, lengths, costs, count, budget) or least + [[] for _ in range(count - len(least))]
    bins.sort(key=lambda rows: -sum(costs[row] for row in rows))
    batches = [tuple(sorted(batch)) for batch in bins]
    steps = [batches[step : step + ranks] for step in range(0, count, ranks)]
    return tuple(tuple(step if i % 2 == 0 else step[::-1]) for i, step in enumerate(steps))


def attention_cost(length: N, half_cost: float) -> N:
    """What a sequence, or each of an array of lengths, costs, in tokens of a short one. At `half_cost` tokens attention, which
    is quadratic, takes as long as all the rest, which is linear; infinity = attention costs nothing.
    """
    return length * (1.0 + length / half_cost)


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first, always into the first bin with room. Rows of one length are placed together: of bins in their order,
    each takes as many as fit, and what is left opens new ones.
    """
    room = np.full(len(order), budget)  # there are never more bins than rows
    bins: list[list[int]] = []
    for length, alike in itertools.groupby(order, key=lambda row: lengths[row]):
        rows = list(alike)
        reach = len(bins) + len(rows)
        taken = np.diff(np.minimum((room[:reach] // max(length, 1)).cumsum(), len(rows)), prepend=0)
        start = 0
        for place in np.flatnonzero(taken).tolist():
            if place == len(bins):
                bins.append([])
            bins[place] += rows[start : start + taken[place]]
            start += taken[place]
        room[:reach] -= taken * length
    return bins


def _spread(
    order: Sequence[int], lengths: Sequence[int], costs: Mapping[int, float], count: int, budget: int
) -> list[list[int]] | None:
    """Dearest first, always into the cheapest of `count` bins that has room; None when a row finds none soon."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    cheapest = [(0.0, i) for i in range(count)]
    for row in order:
        tried: list[tuple[float, int]] = []
        while cheapest and room[cheapest[0][1]] < lengths[row] and len(tried) < _MOST_TRIED:
            tried.append(heapq.heappop(cheapest))
        if not cheapest or len(tried) == _MOST_TRIED:
            return None
        cost, i = cheapest[0]
        bins[i].append(row)
        room[i] -= lengths[row]
        heapq.heapreplace(cheapest, (cost + costs[row], i))
        for entry in tried:
            heapq.heappush(cheapest, entry)
    return bins
