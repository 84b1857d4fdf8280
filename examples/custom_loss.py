"""A loss of one's own: the trust region as a smooth gate instead of a clip (soft adaptive policy optimization, Gao 2025).

    agentrl train --env screenshot_math --algo grpo --algo.trust examples/custom_loss.py:soft

Or a composition with a name of its own:

    agentrl train --env screenshot_math --algo examples/custom_loss.py:SAPO
"""

from __future__ import annotations

import torch
from agentrl.trainers import PolicyTerms, Preset, register_trust
from torch import Tensor

SHARP, SHARPER = 1.0, 1.05
"""How fast the gate closes as the ratio leaves 1; sooner for tokens that are made less likely."""


@register_trust("soft")
def soft(t: PolicyTerms) -> tuple[Tensor, Tensor]:
    """4 / s * sigmoid(s * (ratio - 1)) * A: on policy the plain gradient, fading on both sides; nothing is ever clipped."""
    sharpness = torch.where(t.advantages > 0, SHARP, SHARPER)
    gate = torch.sigmoid(sharpness * (t.ratio - 1)) * 4 / sharpness
    return gate * t.advantages, torch.zeros_like(t.mask)


SAPO = Preset("sapo", "grpo", trust="soft", aggregation="sequence_mean")
