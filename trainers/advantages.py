"""From rewards to advantages: which rollouts count, what the estimator sees, and whitening."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import baselines as baselines  # registers its estimators
from . import distillation as distillation  # registers its estimator
from . import gae as gae  # registers its estimator
from .aggregation import Ids
from .decisions import Decisions
from .estimators import Estimator, find_estimator
from .groups import Groups
from .masking import check_shapes
from .timeline import Timeline, dense_index
from .whitening import whiten as whiten_batch


class Advantages(NamedTuple):
    """advantages float32[B, T], whitened where asked; returns float32[B, T], never whitened; valid bool[B].

    Both are 0 at slots that are not trained and in rows that are not valid; such rows must leave the loss mask. They may be
    one tensor.
    """

    advantages: Tensor
    returns: Tensor
    valid: Tensor


@torch.no_grad()
def compute_advantages(
    name: str,
    rewards: Tensor,
    mask: Tensor,
    *,
    group_ids: Ids | None = None,
    rollout_ids: Ids | None = None,
    values: Tensor | None = None,
    bootstrap: Tensor | None = None,
    token_rewards: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool | None = None,
) -> Advantages:
    """Advantages and returns of a whole batch, as it was taken from the buffer.

    name = advantage, preset or alias. rewards[B] = the rollout's return, repeated in all its rows; NaN = no verdict.
    mask[B, T]: token t is a trained action. group_ids[B] (None: the batch is one group), rollout_ids[B] (None: each
    row is a rollout): any hashable values. values[B, T] = V(state before token t); bootstrap[B] = V after the rollout's
    last trained token, read in the row that holds it, 0 = terminal. token_rewards[B, T] replaces rewards, which then
    only says whether there is a verdict. kl[B, T] = k1 of each token, costs kl_coef. gamma is read by gae and
    reinforce, lam by gae. whiten None = the estimator's default.

    A rollout is valid iff it has a verdict, a trained token and, for group estimators, a valid sibling. Slots outside
    the mask are never read. Raises ValueError: unknown name, a missing or unusable argument, shapes that do not fit the
    mask, rows of one rollout that disagree on reward or group.
    """
    estimator = find_estimator(name)
    _check(estimator, values, token_rewards, kl, kl_coef)
    check_shapes(mask.shape, {"values": values, "token_rewards": token_rewards, "kl": kl})
    check_shapes(mask.shape[:1], {"rewards": rewards, "bootstrap": bootstrap})
    timeline = Timeline(mask.bool(), rollout_ids)
    verdict = _verdicts(rewards, timeline)
    valid, groups = _members(estimator, ~verdict.isnan() & (timeline.lengths > 0), group_ids, timeline)

    def grid(rows: Tensor) -> Tensor:
        return torch.where(valid[:, None], timeline.pack(rows), 0.0)

    outcome = torch.where(valid, verdict, 0.0)
    turns = None if token_rewards is None else grid(token_rewards)
    final = torch.zeros_like(verdict) if bootstrap is None else bootstrap.float()[timeline.last_row]
    decisions = Decisions(
        rewards=outcome if turns is None else turns.sum(1),
        turns=turns,
        penalty=kl_coef * grid(kl)
        if kl is not None and kl_coef
        else outcome.new_zeros(()).expand(timeline.trained.shape),
        penalized=kl is not None and bool(kl_coef),
        values=grid(values) if estimator.critic else None,
        bootstrap=torch.where(valid, final, 0.0),
        trained=timeline.trained,
        lengths=timeline.lengths,
        valid=valid,
        groups=groups,
        gamma=gamma,
        lam=lam,
    )
    return _finish(estimator, decisions, timeline, estimator.whiten if whiten is None else whiten)


def _finish(estimator: Estimator, decisions: Decisions, timeline: Timeline, whitened: bool) -> Advantages:
    counted = decisions.valid[timeline.owner]
    found = estimator.function(decisions)
    check_shapes(timeline.trained.shape, {f"what {estimator.name} returns": found})
    advantages = torch.where(counted, timeline.flat(found).float(), 0.0)
    returns = advantages if decisions.values is None else advantages + timeline.flat(decisions.values)
    if whitened:
        advantages = whiten_batch(advantages, counted)
    of_tokens = timeline.unpack(returns)
    same = advantages is returns
    return Advantages(of_tokens if same else timeline.unpack(advantages), of_tokens, decisions.valid[timeline.rollout])


def _verdicts(rewards: Tensor, timeline: Timeline) -> Tensor:
    """float32[R], NaN = no verdict."""
    rewards = rewards.float()
    if bool(rewards.isinf().any()):
        raise ValueError("rewards must be finite; NaN stands for no verdict")
    return timeline.once(rewards, what="their reward")


def _members(estimator: Estimator, usable: Tensor, group_ids: Ids | None, timeline: Timeline) -> tuple[Tensor, Groups]:
    """valid bool[R], and the groups made of the valid rollouts only."""
    rows = len(timeline.rollout)
    everyone = [0] * rows
    index = dense_index(everyone if group_ids is None else group_ids, rows, device=usable.device)
    index = timeline.once(index, what="their group")
    if estimator.grouped:
        usable = usable & (Groups(index, usable).count() >= 2)
    return usable, Groups(index, usable)


def _check(
    estimator: Estimator, values: Tensor | None, token_rewards: Tensor | None, kl: Tensor | None, kl_coef: float
) -> None:
    if estimator.critic and values is None:
        raise ValueError(f"{estimator.name} needs values")
    if token_rewards is not None and not estimator.by_turn:
        raise ValueError(f"{estimator.name} compares outcomes: it takes rewards, not token_rewards")
    if kl_coef and kl is None:
        raise ValueError("kl_coef without kl")
