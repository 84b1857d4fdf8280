"""Generalised advantage estimation over trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .decisions import Decisions, to_go
from .estimators import register_advantage


@register_advantage("gae", whiten=True, critic=True)
def gae(d: Decisions) -> Tensor:
    """sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t (GAE, Schulman 2016).

    t counts trained tokens of the rollout; V after the last one is `bootstrap`, 0 where the episode ended.
    """
    assert d.values is not None
    shifted = torch.cat([d.values[:, 1:], torch.zeros_like(d.values[:, :1])], dim=1)
    following = shifted + d.at_end(d.bootstrap)
    delta = d.token_rewards - d.penalty + d.gamma * following - d.values
    return to_go(torch.where(d.trained, delta, 0.0), d.gamma * d.lam)
