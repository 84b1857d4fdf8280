"""Rollouts that hold a number which cannot be trained on. Through baselines and whitening one would be in every advantage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ..trajectory import LARGEST_REWARD, Row
from .slots import rollout_ids

_AT_ONCE = 512
"""Rows looked at together, few enough to stay in the processor's cache."""


def too_large(rows: Sequence[Row]) -> list[int]:
    """Rows whose verdict is a reward that float32 cannot hold."""
    return [i for i, row in enumerate(rows) if row.total_reward is not None and not _holds(row)]


def _holds(row: Row) -> bool:
    return abs(row.total_reward or 0.0) <= LARGEST_REWARD and bool((np.abs(row.rewards) <= LARGEST_REWARD).all())


def not_sampled(rows: Sequence[Row]) -> list[int]:
    """Rows with a verdict and, at a trained token, an engine's log-prob that is not finite."""
    found: list[int] = []
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        # That nothing at all is out of range spares a look at each row.
        if not np.isfinite(np.concatenate([row.logprobs for row in some])).all():
            found += [i for i, row in enumerate(some, start) if row.total_reward is not None and not _sampled(row)]
    return found


def _sampled(row: Row) -> bool:
    return bool(np.isfinite(row.logprobs[row.loss_mask]).all())


def withhold(rows: Sequence[Row], unfit: Collection[int]) -> Sequence[Row]:
    """The rows, those of a rollout with an unfit one without verdict."""
    if not unfit:
        return rows
    ids = rollout_ids(rows)
    bad = {ids[i] for i in unfit}
    return [replace(row, total_reward=None) if ids[i] in bad else row for i, row in enumerate(rows)]
