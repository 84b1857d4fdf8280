"""The losses of the actor and of the critic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Ids, aggregate
from .corrections import correction_weights
from .masking import check_shapes, select
from .metrics import Mean, measure
from .trust import PolicyTerms, check_trust, find_trust, policy_ratio


class Loss(NamedTuple):
    """loss: float32 scalar with a graph; metrics: detached sums and counts, each function says over what."""

    loss: Tensor
    metrics: dict[str, Mean]


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    trust: str = "clip",
    rollout_logp: Tensor | None = None,
    correction: str | None = None,
    correction_level: str = "token",
    correction_range: tuple[float, float] | None = None,
    aggregation: str = "token_mean",
    denominator: float | Tensor | None = None,
    rollout_ids: Ids | None = None,
) -> Loss:
    """Policy-gradient loss of rows [B, T]; the gradient flows through logp only, and only where mask is true.

    old_logp = the proximal policy, whose ratio is clipped; rollout_logp = the behaviour policy, read only by a
    correction ("none" = None). See `trust` for level, clip, dual_clip and trust, `corrections` for correction*,
    `aggregate` for the rest.

    Metrics, over trained tokens: clip_fraction (the clip decides), kl_old (k3 of KL(old || new)), ratio, and with a
    correction correction_mean and correction_zeroed (share with weight 0). Raises ValueError on choices out of range and on other
    shapes.
    """
    check_trust(level, trust, clip, dual_clip)
    others = {"old_logp": old_logp, "advantages": advantages, "mask": mask, "rollout_logp": rollout_logp}
    check_shapes(logp.shape, others)
    mask = mask.bool()
    logp, old_logp = select(logp, mask), select(old_logp.detach(), mask)
    advantages = select(advantages.detach(), mask)
    ratio = policy_ratio(logp, old_logp, mask, level)
    objective, decided = find_trust(trust)(PolicyTerms(ratio, logp, advantages, mask, clip, dual_clip))
    log_ratio = (logp.detach() - old_logp).clamp(-20.0, 20.0)
    seen = {"clip_fraction": decided, "kl_old": log_ratio.exp() - 1 - log_ratio, "ratio": ratio}
    if correction not in (None, "none"):
        if rollout_logp is None:
            raise ValueError(f"correction {correction!r} needs rollout_logp")
        weight = correction_weights(
            old_logp, rollout_logp, mask, correction, level=correction_level, limits=correction_range
        )
        objective = weight * objective
        seen |= {"correction_mean": weight, "correction_zeroed": weight == 0}
    loss = aggregate(-objective, mask, aggregation, denominator=denominator, rollout_ids=rollout_ids)
    return Loss(loss, measure(seen, mask))


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    denominator: float | Tensor | None = None,
) -> Loss:
    """0.5 * mean over trained tokens of max((V - G)^2, (V_clipped - G)^2), V_clipped within clip of the old value.

    [B, T] each; without clip the second term goes, and old_values may be None. denominator = trained tokens of the
    update. Metrics, over trained tokens: value_clip_fraction, value_mean, return_mean, value_error (squared). Raises
    ValueError on other shapes. Source: PPO (Schulman 2017), as in its reference code.
    """
    check_shapes(values.shape, {"old_values": old_values, "returns": returns, "mask": mask})
    mask = mask.bool()
    values, returns = select(values, mask), select(returns.detach(), mask)
    error = (values - returns).square()
    worst, outside = error, torch.zeros_like(mask)
    if clip is not None:
        if old_values is None or not clip > 0:
            raise ValueError(f"value clip {clip} must be positive and needs old_values")
        old_values = select(old_values.detach(), mask)
        outside = (values - old_values).abs() > clip
        near = old_values + (values - old_values).clamp(-clip, clip)
        worst = torch.maximum(error, (near - returns).square())
    decided = outside & (worst > error)
    seen = {"value_clip_fraction": decided, "value_mean": values, "return_mean": returns, "value_error": error}
    return Loss(0.5 * aggregate(worst, mask, denominator=denominator), measure(seen, mask))
