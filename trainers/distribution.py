"""Log-probabilities and entropy at a temperature: the one place where logits are scaled.

Policy, reference and entropy of a run use its rollout temperature here, so that they speak of the distribution that was
sampled. Critic, SFT, reward model and DPO leave it at 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import check_shapes


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / T) of the given tokens: logits[..., V], token_ids int[...] -> float32[...]. Raises ValueError on
    other shapes, and for a temperature that is not above 0.
    """
    check_shapes(logits.shape[:-1], {"token_ids": token_ids})
    scaled = _scaled(logits, temperature)
    return scaled.gather(-1, token_ids[..., None].long()).squeeze(-1) - scaled.logsumexp(-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / T): [..., V] -> float32[...]. A logit of -inf is a token of probability 0."""
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logp.exp() * torch.where(logp.isneginf(), 0.0, logp)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: log-probabilities for training need one above 0")
    return logits.float() / temperature
