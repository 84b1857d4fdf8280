"""The algorithm of a run with every axis resolved, applied to rows: their advantages, and the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import Config
from ..engine import Limits
from ..errors import ConfigError
from ..trajectory import Row
from .advantages import Advantages, compute_advantages
from .aggregation import aggregate, token_weights
from .estimators import algorithm, find_estimator
from .losses import Loss, policy_loss
from .shaping import overlong_penalty

OVERLONG_SHARE = 5
"""The overlong buffer is a fifth of the longest episode: 4,096 of 20,480 tokens in DAPO (Yu 2025)."""


@dataclass(frozen=True)
class Decided:
    """The trained tokens of B rows, left-aligned to width L: `mask` bool[B, L], the rest float32[B, L].

    `weights` = share of each token in the update's loss, before its denominator: 1, or 1 / trained tokens of its rollout.
    """

    mask: Tensor
    advantages: Tensor
    rollout_logp: Tensor
    weights: Tensor

    def select(self, rows: Sequence[int]) -> Decided:
        """The same for some of the rows, no wider than they need."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.mask.device)
        width = int(self.mask[index].sum(1).max()) if len(rows) else 0
        parts = (self.mask, self.advantages, self.rollout_logp, self.weights)
        return Decided(*(part[index, :width] for part in parts))

    def to(self, device: torch.device) -> Decided:
        """The same on another device."""
        parts = (self.mask, self.advantages, self.rollout_logp, self.weights)
        return Decided(*(part.to(device) for part in parts))

    def without_weight(self) -> Decided:
        """Nothing of it trained: a forward and backward pass that only keeps the ranks in step."""
        return replace(self, mask=torch.zeros_like(self.mask))


@dataclass(frozen=True)
class Objective:
    """The axes of `algo`, none left open. `old_logp` is current | recompute | rollout."""

    advantage: str
    level: str
    clip: tuple[float, float]
    dual_clip: float | None
    trust: str
    aggregation: str
    correction: str
    correction_level: str
    correction_range: tuple[float, float] | None
    old_logp: str
    gamma: float
    entropy_coef: float
    longest: int
    penalize_overlong: bool

    @classmethod
    def of(cls, config: Config) -> Objective:
        """Preset plus overrides. Raises ConfigError for an algorithm that needs a critic."""
        algo, train, preset = config.algo, config.train, algorithm(config.algo.name)
        advantage = algo.advantage or preset.advantage
        if find_estimator(advantage).critic:
            raise ConfigError(f"--algo {algo.name}: algorithms with a critic cannot be trained.")
        several = train.updates_per_batch * train.epochs > 1
        old_logp = ("recompute" if several else "current") if algo.old_logp == "auto" else algo.old_logp
        corrected = train.max_staleness > 0 and old_logp != "rollout"
        rollout = config.rollout
        return cls(
            advantage=advantage,
            level=algo.level or preset.level,
            clip=algo.clip or preset.clip,
            dual_clip=algo.dual_clip,
            trust=algo.trust or preset.trust,
            aggregation=algo.aggregation or preset.aggregation,
            correction=("tis" if corrected else "none") if algo.correction == "auto" else algo.correction,
            correction_level=algo.correction_level,
            correction_range=algo.correction_range,
            old_logp=old_logp,
            gamma=algo.gamma,
            entropy_coef=algo.entropy_coef,
            longest=Limits(
                rollout.max_turns, rollout.max_new_tokens, max_total_tokens=rollout.max_total_tokens
            ).total_tokens,
            penalize_overlong=preset.overlong_penalty,
        )

    def advantages(self, rows: Sequence[Row]) -> Advantages:
        """Of a whole batch, over its trained tokens: [B, L] as in `Decided`."""
        mask = trained_mask(rows)
        rewards = torch.tensor([float("nan") if row.total_reward is None else row.total_reward for row in rows])
        if self.penalize_overlong:
            rewards = overlong_penalty(
                rewards,
                _rollout_lengths(rows, mask),
                max_new=self.longest,
                buffer=max(1, self.longest // OVERLONG_SHARE),
            )
        return compute_advantages(
            self.advantage,
            rewards,
            mask,
            group_ids=[row.group_id for row in rows],
            rollout_ids=rollout_ids(rows),
            gamma=self.gamma,
        )

    def decide(self, rows: Sequence[Row], advantages: Advantages) -> Decided:
        """What the loss needs of each trained token. Rows that are not valid leave the mask here."""
        mask = trained_mask(rows) & advantages.valid[:, None]
        weights = mask.float()
        if self.aggregation == "sequence_mean":
            weights = token_weights(mask, "sequence_mean", denominator=1.0, rollout_ids=rollout_ids(rows))
        rollout_logp = aligned([torch.from_numpy(row.logprobs[row.loss_mask]) for row in rows])
        return Decided(mask, advantages.advantages, rollout_logp, weights)

    def denominator(self, decided: Decided, rollouts: int) -> float:
        """The divisor of an update's loss: trained tokens, rollouts, or rollouts times the longest one possible."""
        if self.aggregation == "token_mean":
            return float(decided.mask.sum())
        return float(rollouts * (self.longest if self.aggregation == "constant" else 1))

    def has_signal(self, decided: Decided) -> bool:
        """False when no update can follow from the batch: nothing trained, or all advantages 0 and no other term."""
        if not bool(decided.mask.any()):
            return False
        return bool(self.entropy_coef) or bool((decided.advantages[decided.mask] != 0).any())

    def loss(self, logp: Tensor, old_logp: Tensor, entropy: Tensor, decided: Decided, denominator: float) -> Loss:
        """The part that some rows, all [B, L], add to their update's loss.

        The objective is linear in the size of the advantages (clips compare terms that scale alike), so the weights of
        rollouts that are spread over micro-batches go into them.
        """
        loss = policy_loss(
            logp,
            old_logp,
            decided.advantages * decided.weights,
            decided.mask,
            level=self.level,
            clip=self.clip,
            dual_clip=self.dual_clip,
            trust=self.trust,
            rollout_logp=decided.rollout_logp,
            correction=self.correction,
            correction_level=self.correction_level,
            correction_range=self.correction_range,
            aggregation="constant",
            denominator=denominator,
        )
        if not self.entropy_coef:
            return loss
        bonus = aggregate(entropy * decided.weights, decided.mask, "constant", denominator=denominator)
        return Loss(loss.loss - self.entropy_coef * bonus, loss.metrics)


def trained_mask(rows: Sequence[Row]) -> Tensor:
    """bool[B, L]: slot i is row b's i-th trained token."""
    counts = torch.tensor([int(row.loss_mask.sum()) for row in rows], dtype=torch.long)
    return torch.arange(int(counts.max()) if len(rows) else 0) < counts[:, None]


def aligned(parts: Sequence[Tensor]) -> Tensor:
    """One value for each trained token of each row -> [B, L], 0 beyond a row's end."""
    return pad_sequence(list(parts), batch_first=True) if parts else torch.zeros(0, 0)


def rollout_ids(rows: Sequence[Row]) -> list[str]:
    """The rollout of each row; a row without one is a rollout of its own."""
    return [row.rollout_id or f"row {i}" for i, row in enumerate(rows)]


def spread(advantages: Tensor, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
    """[B, L] back onto the tokens of each row: float32[T], 0 where nothing is trained."""
    spread_rows = []
    for row, values in zip(rows, advantages.numpy(), strict=True):
        full = np.zeros(len(row), np.float32)
        full[row.loss_mask] = values[: int(row.loss_mask.sum())]
        spread_rows.append(full)
    return spread_rows


def _rollout_lengths(rows: Sequence[Row], mask: Tensor) -> Tensor:
    """Trained tokens of each row's rollout: float32[B]."""
    totals: dict[str, int] = {}
    ids = rollout_ids(rows)
    for rollout, count in zip(ids, mask.sum(1).tolist(), strict=True):
        totals[rollout] = totals.get(rollout, 0) + count
    return torch.tensor([float(totals[rollout]) for rollout in ids])
