"""Zero mean and unit variance over the trained tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .masking import check_shapes


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / population std over the slots where mask is true; 0 elsewhere. Same shape, float32.

    Exactly 0 everywhere when max - min is 0: the std of equal float32 values is often not 0, and dividing by it would
    make ±1 of nothing. Worked on (x - min) / (max - min) in float64, which neither overflows nor loses a small spread. Raises
    ValueError when the shapes differ.
    """
    check_shapes(x.shape, {"mask": mask})
    mask = mask.bool()
    chosen = x[mask].double()
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if chosen.numel() == 0:
        return result
    low, high = chosen.min(), chosen.max()
    if high == low:
        return result
    unit = (chosen - low) / (high - low)
    result[mask] = ((unit - unit.mean()) / unit.std(correction=0)).float()
    return result
