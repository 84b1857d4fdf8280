"""Losses on pairs: DPO and its kin, and the reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .losses import Loss
from .masking import check_shapes
from .metrics import measure


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Loss:
    """Mean over pairs [B] of log-probabilities summed over the answer tokens.

    h = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected). sigmoid: -logsigmoid(beta h) (DPO, Rafailov
    2023); label_smoothing e: (1 - e) of it and e of the flipped pair (cDPO, Mitchell 2023). ipo: (h - 1/(2 beta))^2
    (IPO, Azar 2023), on the sum of the log-probabilities as everywhere here; TRL's takes their mean.

    Metrics, over pairs: accuracy, margin, reward_chosen, reward_rejected (beta times policy minus reference). Raises
    ValueError: unknown kind, beta not above 0, smoothing outside [0, 0.5) or with ipo, other shapes.
    """
    if kind not in ("sigmoid", "ipo"):
        raise ValueError(f"DPO kind {kind!r} is none of sigmoid, ipo")
    if not beta > 0:
        raise ValueError(f"beta {beta} must be above 0")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind == "ipo"):
        raise ValueError(f"label_smoothing {label_smoothing}: it is in [0, 0.5), and of kind='sigmoid' only")
    others = {"policy_rejected": policy_rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    check_shapes(policy_chosen.shape, others)
    chosen = policy_chosen.float() - ref_chosen.detach().float()
    rejected = policy_rejected.float() - ref_rejected.detach().float()
    h = chosen - rejected
    if kind == "ipo":
        losses = (h - 1 / (2 * beta)).square()
    else:
        losses = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    seen = {"accuracy": h > 0, "margin": beta * h, "reward_chosen": beta * chosen, "reward_rejected": beta * rejected}
    return Loss(losses.mean(), measure(seen, torch.ones_like(h, dtype=torch.bool)))


def reward_model_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float | None = None) -> Loss:
    """-logsigmoid(chosen - rejected - margin), mean over pairs [B] of scores (Bradley-Terry; margin: Llama 2 2023).

    Metrics, over pairs: accuracy, margin (of the scores), score_chosen, score_rejected. margin [B], or one number for all
    of them. Raises ValueError on other shapes.
    """
    least = torch.as_tensor(0.0 if margin is None else margin, device=chosen.device)
    check_shapes(chosen.shape, {"rejected": rejected, "margin": least if least.dim() else None})
    chosen, rejected = chosen.float(), rejected.float()
    difference = chosen - rejected
    losses = -logsigmoid(difference - least.float())
    seen = {"accuracy": difference > 0, "margin": difference, "score_chosen": chosen, "score_rejected": rejected}
    return Loss(losses.mean(), measure(seen, torch.ones_like(difference, dtype=torch.bool)))
