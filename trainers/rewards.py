"""From the verdicts on rollouts to the rewards that advantages are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..engine import Limits
from ..errors import ConfigError
from ..trajectory import Row
from .estimators import algorithm
from .shaping import clip_rewards, overlong_mask, overlong_penalty, stale_mask, stop_properly
from .slots import at_slots, last_slots, rollout_sums, trained_mask

OVERLONG_SHARE = 5
"""The overlong buffer is a fifth of the longest episode: 4,096 of 20,480 tokens in DAPO (Yu 2025)."""


@dataclass(frozen=True)
class Shaping:
    """What a run does to rewards and loss masks. `longest` = most trained tokens of a rollout; None = that step is off.

    stale_after = versions behind the trained weights beyond which a token leaves the loss.
    """

    longest: int
    clip: tuple[float, float] | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    stop_properly: float | None = None
    by_turn: bool = False
    mask_overlong: bool = False
    stale_after: int | None = None

    @classmethod
    def of(cls, config: Config) -> Shaping:
        """Raises ConfigError for a buffer longer than the longest episode."""
        algo, rollout = config.algo, config.rollout
        longest = Limits(
            rollout.max_turns, rollout.max_new_tokens, max_total_tokens=rollout.max_total_tokens
        ).total_tokens
        overlong = algo.overlong
        penalized = algorithm(algo.name).overlong_penalty if overlong.penalty is None else overlong.penalty
        buffer = overlong.buffer or max(1, longest // OVERLONG_SHARE)
        if penalized and buffer > longest:
            raise ConfigError(
                f"--algo.overlong.buffer {buffer} is more than the {longest} tokens an episode may sample."
            )
        return cls(
            longest=longest,
            clip=algo.reward_clip,
            overlong_buffer=buffer if penalized else None,
            overlong_factor=overlong.factor,
            stop_properly=algo.stop_properly,
            by_turn=algo.credit == "turn",
            mask_overlong=overlong.mask,
            stale_after=config.train.max_staleness if rollout.mask_stale_tokens else None,
        )

    def outcomes(self, rows: Sequence[Row]) -> Tensor:
        """The shaped return of each row's rollout: float32[B], NaN without a verdict."""
        rewards = _verdicts(rows)
        if self.clip is not None:
            rewards = clip_rewards(rewards, *self.clip)
        if self.overlong_buffer is not None:
            rewards = overlong_penalty(
                rewards,
                rollout_sums(rows, [float(np.count_nonzero(row.loss_mask)) for row in rows]),
                max_new=self.longest,
                buffer=self.overlong_buffer,
                factor=self.overlong_factor,
            )
        if self.stop_properly is not None:
            rewards = stop_properly(rewards, _truncated(rows), self.stop_properly)
        return rewards

    def token_rewards(self, rows: Sequence[Row]) -> Tensor | None:
        """Each turn's reward on its last token, [B, L]; None where the outcome counts.

        What turns without a trained token earned, and what shaping adds to the rollout's return or takes from it, falls on
        its last trained token.
        """
        if not self.by_turn:
            return None
        turns = at_slots([row.rewards for row in rows], rows)
        earned = rollout_sums(rows, turns.double().sum(1).tolist())
        change = torch.nan_to_num(self.outcomes(rows) - earned)
        last = last_slots(rows, trained_mask(rows))
        return turns + torch.where(last, change[:, None], 0.0)

    def loss_mask(self, rows: Sequence[Row], mask: Tensor, version: int) -> Tensor:
        """The mask [B, L] without what is to stay out of the loss, when weights of `version` are trained."""
        if self.mask_overlong:
            mask = overlong_mask(mask, _truncated(rows))
        if self.stale_after is not None:
            mask = stale_mask(mask, at_slots([row.versions for row in rows], rows), version - self.stale_after)
        return mask


def _verdicts(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([float("nan") if row.total_reward is None else row.total_reward for row in rows])


def _truncated(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.truncated for row in rows], dtype=torch.bool)
