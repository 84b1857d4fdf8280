"""Off-policy corrections: weights for tokens that another policy, or another engine, has sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import suggest
from .masking import check_shapes, row_mean, select

DEFAULT_RANGE = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mask_tis": (0.5, 5.0), "decoupled": (0.0, 5.0)}
LEVELS = ("token", "sequence")


@torch.no_grad()
def correction_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    kind: str,
    *,
    level: str = "token",
    limits: tuple[float, float] | None = None,
) -> Tensor:
    """float32[B, T], detached: what each token's loss is multiplied with; 1 outside the mask.

    w = exp(old - rollout), proximal over behaviour policy. level sequence: w = exp(mean of log w) over the trained
    tokens of the row, the same for all of them (a sum would explode with the length).

    tis: w clamped to [low, high], default (0, 2) (truncated importance sampling). icepop: w, 0 outside [low, high],
    default (.5, 5) (IcePop). seq_mask_tis: min(w, high), 0 in rows whose geometric mean of w is outside, default
    (.5, 5). decoupled: w, 0 above high, default 5; low is not read (decoupled PPO, AReaL 2025).

    A weight of 0 takes the token out of the numerator only. Raises ValueError: unknown kind or level, low > high,
    other shapes.
    """
    if kind not in DEFAULT_RANGE:
        raise ValueError(f"correction {kind!r} is none of {', '.join(DEFAULT_RANGE)}.{suggest(kind, DEFAULT_RANGE)}")
    if level not in LEVELS:
        raise ValueError(f"correction level {level!r} is none of {', '.join(LEVELS)}.{suggest(level, LEVELS)}")
    low, high = DEFAULT_RANGE[kind] if limits is None else limits
    if not 0 <= low <= high:
        raise ValueError(f"correction range ({low}, {high}) is not 0 <= low <= high")
    check_shapes(old_logp.shape, {"rollout_logp": rollout_logp, "mask": mask})
    mask = mask.bool()
    log_weight = select(old_logp, mask) - select(rollout_logp, mask)
    row = _exp(row_mean(log_weight, mask)).expand_as(log_weight)
    weight = row if level == "sequence" else _exp(log_weight)
    if kind == "tis":
        weight = weight.clamp(low, high)
    elif kind == "icepop":
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    elif kind == "seq_mask_tis":
        weight = torch.where((row >= low) & (row <= high), weight.clamp(max=high), 0.0)
    else:
        weight = torch.where(weight <= high, weight, 0.0)
    return torch.where(mask, weight, 1.0)


def _exp(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(-20.0, 20.0).exp()
