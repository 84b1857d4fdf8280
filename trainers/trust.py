"""The policy objective of each token, and how far it lets the policy move.

A form of it is one function `PolicyTerms -> (objective, decided)`, chosen with `--algo.trust`:

    @register_trust("mine")
    def mine(t: PolicyTerms) -> tuple[Tensor, Tensor]:
        return t.ratio * t.advantages, torch.zeros_like(t.mask)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..registry import suggest
from .masking import row_mean
from .plugins import from_outside

LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class PolicyTerms:
    """What an objective sees of rows [B, T]: float32, ratio 1 and the rest 0 where mask (bool) is false.

    ratio = new over proximal policy, of the token or of its row; the gradient flows through ratio and logp. clip =
    (low, high) around 1. dual_clip is given for trust "clip" only.
    """

    ratio: Tensor
    logp: Tensor
    advantages: Tensor
    mask: Tensor
    clip: tuple[float, float]
    dual_clip: float | None = None


Function = Callable[[PolicyTerms], tuple[Tensor, Tensor]]
_trusts: dict[str, Function] = {}


def register_trust(name: str) -> Callable[[Function], Function]:
    """Decorator: give an objective, to be maximised, a name for `policy_loss` and `--algo.trust`. The last one holds.

    It returns [B, T] and, for the metric clip_fraction, bool[B, T]: where the trust region decides. The objective must
    scale with the advantages, as the weights of rollouts that are spread over micro-batches are put into them. Raises
    ValueError when it does not.
    """

    def register(function: Function) -> Function:
        ratio = torch.tensor([[0.25, 0.75, 1.0, 1.25, 4.0]])
        advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 5)
        terms = PolicyTerms(ratio.expand(2, 5), ratio.log(), advantages, advantages != 0, (0.2, 0.2))
        once, twice = function(terms)[0], function(replace(terms, advantages=2 * advantages))[0]
        if not torch.allclose(2 * once, twice):
            raise ValueError(f"trust {name!r}: twice the advantage must be twice the objective")
        _trusts[name] = function
        return function

    return register


def find_trust(name: str) -> Function:
    """The objective of a name or `path/to/file.py:function`. Raises ValueError with the nearest names."""
    if name not in _trusts:
        found = from_outside(name)
        name = next((own for own, function in _trusts.items() if function is found), name)
    if name not in _trusts:
        known = ", ".join(_trusts)
        raise ValueError(f"There is no trust region named {name!r}.{suggest(name, _trusts)} Known: {known}.")
    return _trusts[name]


def policy_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp(clamp(logp - old, -20, 20)): [B, T]; level sequence: exp of the row's mean over its trained tokens (GSPO)."""
    log_ratio = (logp - old_logp).clamp(-20.0, 20.0)
    return (row_mean(log_ratio, mask).expand_as(log_ratio) if level == "sequence" else log_ratio).exp()


@register_trust("clip")
def clipped_objective(t: PolicyTerms) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman 2017); dual clip c bounds it below by c A where A < 0 (Ye 2020)."""
    free = t.ratio * t.advantages
    bounded = t.ratio.clamp(1.0 - t.clip[0], 1.0 + t.clip[1]) * t.advantages
    objective, decided = torch.minimum(free, bounded), bounded < free
    if t.dual_clip is not None:
        floor = t.dual_clip * t.advantages
        below = (t.advantages < 0) & (objective < floor)
        objective, decided = torch.where(below, floor, objective), decided | below
    return objective, decided


@register_trust("cispo")
def cispo_objective(t: PolicyTerms) -> tuple[Tensor, Tensor]:
    """stop_gradient(clip(r)) A logp, decided where r is clipped (CISPO, MiniMax-M1 2025): no token loses its gradient."""
    ratio = t.ratio.detach()
    bounded = ratio.clamp(1.0 - t.clip[0], 1.0 + t.clip[1])
    return bounded * t.advantages * t.logp, bounded != ratio


def check_trust(level: str, trust: str, clip: tuple[float, float], dual_clip: float | None) -> None:
    """Raises ValueError for choices that do not exist or do not go together."""
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}.{suggest(level, LEVELS)}")
    find_trust(trust)
    low, high = clip
    if not (0 <= low <= 1 and high >= 0) or (low == 1 and trust == "clip"):
        raise ValueError(f"clip ({low}, {high}): low must be in [0, 1) ([0, 1] for cispo) and high not negative")
    if dual_clip is not None and (trust != "clip" or not dual_clip > 1):
        raise ValueError(f"dual_clip {dual_clip}: it must be above 1, and goes with trust='clip' only")
