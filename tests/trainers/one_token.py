"""The policy loss of a single token, which can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from agentrl.trainers import policy_loss


def single(log_ratio: float, advantage: float = 1.0, **options: Any) -> tuple[float, float]:
    """Loss of one token and its derivative by logp."""
    logp = torch.tensor([[log_ratio]], requires_grad=True)
    loss = policy_loss(logp, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1), **options).loss
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()
