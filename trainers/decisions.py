"""What an advantage estimator sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .groups import Groups


@dataclass(frozen=True)
class Decisions:
    """R rollouts as sequences of at most L decisions (trained tokens), left-aligned. All float32 unless said.

    rewards [R] = return of the rollout (the sum of its turn rewards where those are given).
    turns [R, L] = the same return on the tokens that earned it, turn by turn; None where the outcome counts.
    penalty [R, L] = kl_coef * KL of each token; 0 without KL in the reward, which is `penalized`.
    values [R, L] = V(state before the token), None without a critic; bootstrap [R] = V after the last token.
    trained bool[R, L]; lengths int64[R] = its trained tokens; valid bool[R] = has a verdict and a trained token.
    Everything is 0 at slots that are not trained and in rollouts that are not valid. To be read only: what is 0
    everywhere may be one number seen [R, L] times.
    """

    rewards: Tensor
    turns: Tensor | None
    penalty: Tensor
    penalized: bool
    values: Tensor | None
    bootstrap: Tensor
    trained: Tensor
    lengths: Tensor
    valid: Tensor
    groups: Groups
    gamma: float
    lam: float

    @cached_property
    def token_rewards(self) -> Tensor:
        """The return on the tokens that earned it: [R, L], turn by turn or on the last one."""
        return self.at_end(self.rewards) if self.turns is None else self.turns

    def outcome_to_go(self, x: Tensor) -> Tensor:
        """x[R] earned with the last decision, less the penalties, from each decision on: [R, L]."""
        if self.penalized:
            return to_go(self.at_end(x) - self.penalty, 1.0)
        return single(x)[:, None].expand(self.trained.shape)

    def at_end(self, x: Tensor) -> Tensor:
        """x[R] on the last decision of each rollout: float32[R, L]; what float32 cannot hold is its largest number."""
        return at_end(single(x), self.lengths, self.trained.shape[1])


def single(x: Tensor) -> Tensor:
    """float32; what it cannot hold becomes its largest number."""
    largest = torch.finfo(torch.float32).max
    return x.clamp(-largest, largest).float()


def at_end(x: Tensor, lengths: Tensor, width: int) -> Tensor:
    """x[R] at slot lengths - 1 of each row, 0 elsewhere: [R, width]. Rows of length 0 have no such slot."""
    result = torch.zeros(len(x), width, dtype=x.dtype, device=x.device)
    rows = lengths.nonzero()[:, 0]
    result[rows, lengths[rows] - 1] = x[rows]
    return result


def to_go(x: Tensor, decay: float) -> Tensor:
    """y[:, t] = x[:, t] + decay * y[:, t + 1], for x[R, L] that is 0 right of each sequence's end."""
    if decay == 1:
        return x.flip(1).cumsum(1).flip(1)
    by_time = x.t().contiguous()  # a step reads and writes whole rows of memory
    for t in reversed(range(len(by_time) - 1)):
        by_time[t].add_(by_time[t + 1], alpha=decay)
    return by_time.t()
