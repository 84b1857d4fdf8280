"""Critic-free estimators: the return to go, less what the group tells about the task.

KL in the reward is summed to go in all of them, after the group statistics. Only `reinforce` discounts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decisions import Decisions, to_go
from .estimators import register_advantage


@register_advantage("reinforce", whiten=True)
def reinforce(d: Decisions) -> Tensor:
    """Discounted return to go; whitened over the batch it is REINFORCE++ (Hu 2025)."""
    if d.turns is None and d.gamma == 1:
        return d.outcome_to_go(d.rewards)
    return to_go(d.token_rewards - d.penalty, d.gamma)


@register_advantage("reinforce_baseline", whiten=True, grouped=True, discounted=False)
def reinforce_baseline(d: Decisions) -> Tensor:
    """Return to go less the group's mean return, whitened over the batch (REINFORCE++-baseline, Hu 2025)."""
    if d.turns is None:
        return d.outcome_to_go(_centred(d))
    return to_go(d.turns - d.at_end(d.groups.mean(d.rewards)) - d.penalty, 1.0)


@register_advantage("rloo", grouped=True, by_turn=False, discounted=False)
def rloo(d: Decisions) -> Tensor:
    """R - mean of the other members' R (RLOO, Ahmadian 2024)."""
    above = d.groups.above_lowest(d.rewards)
    others = (d.groups.total(above) - above) / (d.groups.count() - 1).clamp(min=1)
    return d.outcome_to_go(above - others)


@register_advantage("grpo", grouped=True, by_turn=False, discounted=False)
def grpo(d: Decisions) -> Tensor:
    """(R - mean) / (sample std + 1e-6) in the group (GRPO, Shao 2024)."""
    centred = _centred(d)
    variance = d.groups.total(centred.square()) / (d.groups.count() - 1).clamp(min=1)
    return d.outcome_to_go(centred / (torch.sqrt(variance) + 1e-6))


@register_advantage("dr_grpo", grouped=True, by_turn=False, discounted=False)
def dr_grpo(d: Decisions) -> Tensor:
    """R - mean in the group, without the division by the std (Dr. GRPO, Liu 2025)."""
    return d.outcome_to_go(_centred(d))


def _centred(d: Decisions) -> Tensor:
    above = d.groups.above_lowest(d.rewards)
    return above - d.groups.mean(above)
