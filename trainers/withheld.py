"""Rollouts that hold a number which cannot be trained on: they are treated as having no verdict, and the rest of the batch
stays. One such number would go through baselines and whitening into every advantage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from ..trajectory import LARGEST_REWARD, Row
from .slots import at_slots, rollout_ids


def unfit_rows(rows: Sequence[Row]) -> list[int]:
    """Rows with a verdict, and a reward that float32 cannot hold or, at a trained token, an engine's log-prob that is not
    finite.
    """
    verdicts = torch.tensor([row.total_reward or 0.0 for row in rows], dtype=torch.float64)
    unfit = ~(verdicts.abs() <= LARGEST_REWARD)  # NaN as well
    for parts in ([row.rewards for row in rows], [row.logprobs for row in rows]):
        unfit |= (~at_slots(parts, rows).isfinite()).any(1)
    return [i for i in unfit.nonzero()[:, 0].tolist() if rows[i].total_reward is not None]


def withhold(rows: Sequence[Row], unfit: Collection[int]) -> Sequence[Row]:
    """The rows, those of a rollout with an unfit one without verdict."""
    if not unfit:
        return rows
    ids = rollout_ids(rows)
    bad = {ids[i] for i in unfit}
    return [replace(row, total_reward=None) if ids[i] in bad else row for i, row in enumerate(rows)]
