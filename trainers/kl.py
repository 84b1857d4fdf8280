"""KL divergence from a reference policy, estimated from the sampled tokens."""

from __future__ import annotations

from torch import Tensor

from .aggregation import Ids, aggregate
from .losses import Loss
from .masking import check_shapes, select
from .metrics import measure


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens sampled from the policy; float32, the inputs' shape.

    d = logp - ref, clamped to ±20. k1 = d (unbiased, may be negative); k2 = d^2 / 2 (biased; its gradient is that of
    the reverse KL); k3 = exp(-d) - 1 + d (unbiased, never negative; its gradient is not that of the reverse KL).
    Source: Schulman, "Approximating KL divergence" (2020). Raises ValueError: unknown kind, other shapes.
    """
    check_shapes(logp.shape, {"ref_logp": ref_logp})
    d = (logp.float() - ref_logp.float()).clamp(-20.0, 20.0)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return (-d).exp() - 1 + d
    raise ValueError(f"KL estimate {kind!r} is none of k1, k2, k3")


def kl_loss(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    aggregation: str = "token_mean",
    denominator: float | Tensor | None = None,
    rollout_ids: Ids | None = None,
) -> Loss:
    """The KL term of the loss, before its coefficient: k2, whose gradient d * grad(logp) is that of the reverse KL.

    [B, T] each; weights multiply the terms (None = 1). k1 has gradient 0 on average and k3 that of another divergence, so
    neither is offered. Metric, over trained tokens: kl_ref (k3).
    """
    check_shapes(logp.shape, {"ref_logp": ref_logp, "mask": mask, "weights": weights})
    mask = mask.bool()
    logp, ref_logp = select(logp, mask), select(ref_logp.detach(), mask)
    per_token = kl_estimate(logp, ref_logp, "k2")
    if weights is not None:
        per_token = per_token * weights
    loss = aggregate(per_token, mask, aggregation, denominator=denominator, rollout_ids=rollout_ids)
    return Loss(loss, measure({"kl_ref": kl_estimate(logp.detach(), ref_logp, "k3")}, mask))
