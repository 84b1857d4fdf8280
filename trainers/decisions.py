"""What an advantage estimator sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import Groups


@dataclass(frozen=True)
class Decisions:
    """R rollouts as sequences of at most L decisions (trained tokens), left-aligned. All float32 unless said.

    rewards [R] = return of the rollout (the sum of its turn rewards where those are given).
    token_rewards [R, L] = the same return on the tokens that earned it: on the last one, or turn by turn.
    penalty [R, L] = kl_coef * KL of each token; 0 without KL in the reward.
    values [R, L] = V(state before the token), None without a critic; bootstrap [R] = V after the last token.
    trained bool[R, L]; valid bool[R] = has a verdict and a trained token.
    Everything is 0 at slots that are not trained and in rollouts that are not valid.
    """

    rewards: Tensor
    token_rewards: Tensor
    penalty: Tensor
    values: Tensor | None
    bootstrap: Tensor
    trained: Tensor
    valid: Tensor
    groups: Groups
    gamma: float
    lam: float

    def at_end(self, x: Tensor) -> Tensor:
        """x[R] on the last decision of each rollout: [R, L]."""
        return at_end(x, self.trained)


def at_end(x: Tensor, trained: Tensor) -> Tensor:
    """x[R] on the last true slot of each row of the left-aligned trained bool[R, L]; 0 elsewhere."""
    place = torch.arange(trained.shape[1], device=x.device)
    return torch.where(place == trained.sum(1, keepdim=True) - 1, x[:, None], 0.0)


def to_go(x: Tensor, decay: float) -> Tensor:
    """y[:, t] = x[:, t] + decay * y[:, t + 1], for x[R, L] that is 0 right of each sequence's end."""
    result = torch.empty_like(x)
    running = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for t in reversed(range(x.shape[1])):
        running = x[:, t] + decay * running
        result[:, t] = running
    return result
