"""Rollouts that hold a number which cannot be trained on: they are treated as having no verdict, and the rest of the batch
stays. One such number would go through baselines and whitening into every advantage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ..trajectory import LARGEST_REWARD, Row
from .slots import rollout_ids

_AT_ONCE = 512
"""Rows looked at together, few enough to stay in the processor's cache."""


def unfit_rows(rows: Sequence[Row]) -> list[int]:
    """Rows with a verdict, and a reward that float32 cannot hold or, at a trained token, an engine's log-prob that is not
    finite.
    """
    unfit: list[int] = []
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        if not _all_clean(some):
            unfit += [i for i, row in enumerate(some, start) if not _fit(row)]
    return unfit


def _all_clean(rows: Sequence[Row]) -> bool:
    """Whether nothing at all is out of range in these rows, as nearly always: it spares a look at each."""
    verdicts = np.array([row.total_reward or 0.0 for row in rows])
    numbers = np.concatenate([part for row in rows for part in (row.rewards, row.logprobs)])
    return bool((np.abs(verdicts) <= LARGEST_REWARD).all() and np.isfinite(numbers).all())


def _fit(row: Row) -> bool:
    if row.total_reward is None:
        return True
    numbers = np.concatenate([part[row.loss_mask] for part in (row.rewards, row.logprobs)])
    return abs(row.total_reward) <= LARGEST_REWARD and bool(np.isfinite(numbers).all())


def withhold(rows: Sequence[Row], unfit: Collection[int]) -> Sequence[Row]:
    """The rows, those of a rollout with an unfit one without verdict."""
    if not unfit:
        return rows
    ids = rollout_ids(rows)
    bad = {ids[i] for i in unfit}
    return [replace(row, total_reward=None) if ids[i] in bad else row for i, row in enumerate(rows)]
