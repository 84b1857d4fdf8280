"""From per-token losses to one number.

Every mode is a weighted sum, sum(weight * per_token). The weights depend on mask, rollouts and denominator alone, so an
update whose rollouts are spread over micro-batches can compute them once and sum the parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from ..registry import suggest
from .masking import check_shapes, select
from .timeline import dense_index

Ids: TypeAlias = Iterable[object] | Tensor
MODES = ("token_mean", "sequence_mean", "constant")


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    *,
    denominator: float | Tensor | None = None,
    rollout_ids: Ids | None = None,
) -> Tensor:
    """Scalar float32 loss of per_token[B, T] over the slots where mask is true; 0, with a graph, when none is.

    token_mean: sum over tokens / number of trained tokens (DAPO, Yu 2025). sequence_mean: mean over the trained tokens
    of each rollout, summed / number of rollouts with one (GRPO, Shao 2024). constant: sum / denominator (Dr. GRPO,
    Liu 2025). `denominator` is the final divisor in each mode: the count over the whole optimizer update, which the
    micro-batches share, so that their losses add up to the update's. rollout_ids[B]: None = each row is a rollout.
    Raises ValueError: unknown mode, constant without denominator, a denominator that is not positive, other shapes.
    """
    check_shapes(mask.shape, {"per_token": per_token})
    weights = token_weights(mask, mode, denominator=denominator, rollout_ids=rollout_ids)
    return (weights * select(per_token, mask.bool())).sum()


def token_weights(
    mask: Tensor,
    mode: str = "token_mean",
    *,
    denominator: float | Tensor | None = None,
    rollout_ids: Ids | None = None,
) -> Tensor:
    """float32[B, T]: the share of each token in the loss that `aggregate` computes; 0 outside the mask."""
    if mode not in MODES:
        raise ValueError(f"aggregation {mode!r} is none of {', '.join(MODES)}.{suggest(mode, MODES)}")
    if mode == "constant" and denominator is None:
        raise ValueError("aggregation='constant' needs a denominator")
    if denominator is not None and not denominator > 0:
        raise ValueError(f"the denominator must be positive, not {denominator}")
    mask = mask.bool()
    counts = mask.float().sum(1)
    of_row = torch.ones_like(counts)
    own = counts.sum()
    if mode == "sequence_mean":
        rollout = dense_index(rollout_ids, len(mask), device=mask.device)
        lengths = torch.zeros_like(counts).index_add(0, rollout, counts)
        of_row = of_row / lengths.clamp(min=1)[rollout]
        own = (lengths > 0).sum()
    of_row = of_row / (own.clamp(min=1) if denominator is None else denominator)
    return torch.where(mask, of_row[:, None], 0.0)
