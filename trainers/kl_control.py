"""The coefficient of the KL term, fixed or steered to a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def update(self, kl: float, rollouts: int) -> None:
        """Nothing to do; the same call as AdaptiveKL's."""


@dataclass
class AdaptiveKL:
    """Raises `coef` while the KL is above `target` and lowers it while below; `coef` is the whole state to save.

    coef *= 1 + clamp(kl / target - 1, ±0.2) * min(1, rollouts / horizon), once a batch (Ziegler 2019). horizon in rollouts:
    one shorter than the batch acts as the batch does, so the coefficient never changes its sign.
    """

    coef: float
    target: float
    horizon: float = 10_000

    def update(self, kl: float, rollouts: int) -> None:
        """kl = mean over the batch's trained tokens; rollouts = how many the batch had."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(1.0, rollouts / self.horizon)


def kl_controller(coef: float, target: float | None = None, horizon: float = 10_000) -> FixedKL | AdaptiveKL:
    """Adaptive when there is a target. Raises ValueError: a coefficient below 0, or target or horizon not above it."""
    if coef < 0 or (target is not None and target <= 0) or horizon <= 0:
        raise ValueError(f"KL coefficient {coef}, target {target}, horizon {horizon}: none may be negative")
    return FixedKL(coef) if target is None else AdaptiveKL(coef, target, horizon)
