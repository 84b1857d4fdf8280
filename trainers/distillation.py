"""On-policy distillation: the student's own samples, judged token by token by a teacher."""

from __future__ import annotations

from torch import Tensor

from .decisions import Decisions
from .estimators import register_advantage


@register_advantage("distill", teacher=True, discounted=False)
def distill(d: Decisions) -> Tensor:
    """-kl_coef * kl of each token by itself, kl = log student - log teacher: descends the reverse KL from the teacher at
    the states the student visits (Agarwal 2024, GKD; Gu 2024, MiniLLM). Rewards only say whether there is a verdict.
    """
    return -d.penalty
