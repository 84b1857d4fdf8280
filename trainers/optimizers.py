"""The optimizer, and its learning rate as a function of the planned update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..config import OptimSection

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def make_optimizer(model: nn.Module, config: OptimSection, lr: float) -> Optimizer:
    """AdamW (Loshchilov 2019), plain SGD, or Muon with AdamW, over the parameters that want a gradient.

    Weight decay is decoupled for all (without momentum SGD's penalty is the same thing) and spares vectors: norms, biases.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.name == "sgd":
        return torch.optim.SGD(_groups(parameters, config), lr=lr)
    if config.name == "muon":
        from .muon import MuonWithAdamW, hidden_matrices

        hidden = hidden_matrices(model)
        return MuonWithAdamW(
            _groups([p for p in parameters if id(p) in hidden], config),
            _groups([p for p in parameters if id(p) not in hidden], config),
            lr=lr,
            betas=config.betas,
            eps=config.eps,
        )
    return torch.optim.AdamW(_groups(parameters, config), lr=lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(parameters: list[nn.Parameter], config: OptimSection) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without; no group is empty. The groups are the same whatever the decay: a run may
    go on with another.
    """
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(config: OptimSection, lr: float, update: int, planned: int) -> float:
    """The rate of planned update `update` (from 0) of `planned`, made or skipped.

    Warmup: lr * update / warmup. Then constant, or a line or half a cosine from lr down to min_lr_ratio * lr, which the
    update after the last would have.
    """
    warmup = config.warmup or round(config.warmup_ratio * planned)
    if update < warmup:
        return lr * update / warmup
    if config.schedule == "constant":
        return lr
    done = min(1.0, (update - warmup) / max(1, planned - warmup))
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
