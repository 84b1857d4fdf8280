"""The policy objective of each token, and how far it lets the policy move."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import row_mean

LEVELS = ("token", "sequence")
TRUSTS = ("clip", "cispo")


def policy_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp(clamp(logp - old, -20, 20)): [B, T]; level sequence: exp of the row's mean over its trained tokens (GSPO)."""
    log_ratio = (logp - old_logp).clamp(-20.0, 20.0)
    return (row_mean(log_ratio, mask).expand_as(log_ratio) if level == "sequence" else log_ratio).exp()


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and where the clip decides (PPO, Schulman 2017): [B, T] each.

    Dual clip c bounds it below by c A where A < 0 (Ye 2020).
    """
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) * advantages
    objective, decided = torch.minimum(free, bounded), bounded < free
    if dual_clip is not None:
        floor = dual_clip * advantages
        below = (advantages < 0) & (objective < floor)
        objective, decided = torch.where(below, floor, objective), decided | below
    return objective, decided


def cispo_objective(
    ratio: Tensor, logp: Tensor, advantages: Tensor, clip: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """stop_gradient(clip(r)) A logp, and where r was clipped (CISPO, MiniMax-M1 2025): no token loses its gradient."""
    ratio = ratio.detach()
    bounded = ratio.clamp(1.0 - clip[0], 1.0 + clip[1])
    return bounded * advantages * logp, bounded != ratio


def check_trust(level: str, trust: str, clip: tuple[float, float], dual_clip: float | None) -> None:
    """Raises ValueError for choices that do not exist or do not go together."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}")
    if trust not in TRUSTS:
        raise ValueError(f"trust {trust!r} is none of {', '.join(TRUSTS)}")
    low, high = clip
    if not (0 <= low <= 1 and high >= 0) or (low == 1 and trust == "clip"):
        raise ValueError(f"clip ({low}, {high}): low must be in [0, 1) ([0, 1] for cispo) and high not negative")
    if dual_clip is not None and (trust != "clip" or not dual_clip > 1):
        raise ValueError(f"dual_clip {dual_clip}: it must be above 1, and goes with trust='clip' only")
