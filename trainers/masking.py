"""Reading only what is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_shapes(shape: Sequence[int], given: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError, with the name, for a tensor of another shape: broadcast, it would give a number, and a wrong one."""
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} is {list(tensor.shape)}; to go with the others it must be {list(shape)}")


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x as float32 where mask, else 0. NaN or inf at a masked slot reaches neither the value nor the gradient.

    To be called before any arithmetic: a `where` that comes after it sends 0 * NaN = NaN backwards.
    """
    return torch.where(mask, x.float(), 0.0)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x[B, T] over each row's true slots: [B, 1]; 0 for a row without any. x must be finite where mask is."""
    return select(x, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
