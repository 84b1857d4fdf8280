"""What is done to rewards and masks between the verdict and the advantages.

Order: verdict, group filter on the raw score, clip of the raw reward, overlong penalty, stop-properly, baseline, KL,
whitening. A reward of NaN (no verdict) stays NaN throughout. Overlong mask and stale mask act on the loss only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_rewards(rewards: Tensor, low: float, high: float) -> Tensor:
    """rewards[B] within [low, high]."""
    if low > high:
        raise ValueError(f"reward clip ({low}, {high}): low is above high")
    return rewards.clamp(low, high)


def overlong_penalty(rewards: Tensor, lengths: Tensor, *, max_new: int, buffer: int, factor: float = 1.0) -> Tensor:
    """R - factor * min(e, buffer) / buffer for e = length - (max_new - buffer) > 0 (soft overlong, DAPO, Yu 2025).

    rewards[B], lengths[B] = trained tokens of the rollout, max_new = the most it may have. Raises ValueError: buffer
    not in 1..max_new, or a negative factor.
    """
    if not 0 < buffer <= max_new or factor < 0:
        raise ValueError(f"overlong penalty: buffer {buffer} is not in 1..{max_new}, or factor {factor} is negative")
    excess = (lengths - (max_new - buffer)).clamp(0, buffer)
    return rewards.float() - factor * excess.float() / buffer


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Rewards[B] of truncated rollouts (bool[B]): coef >= 0 multiplies them, coef < 0 stands in their place."""
    replaced = rewards * coef if coef >= 0 else torch.where(rewards.isnan(), rewards, coef)
    return torch.where(truncated.bool(), replaced, rewards)


def overlong_mask(mask: Tensor, truncated: Tensor) -> Tensor:
    """The loss mask bool[B, T] without the rows of truncated rollouts (bool[B]): out of numerator and denominator."""
    return mask.bool() & ~truncated.bool()[:, None]


def stale_mask(mask: Tensor, versions: Tensor, oldest: int) -> Tensor:
    """The loss mask bool[B, T] without the tokens sampled by weights older than version `oldest`; versions int[B, T]."""
    return mask.bool() & (versions >= oldest)
