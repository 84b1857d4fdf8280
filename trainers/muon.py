"""Muon (Jordan 2024) for the hidden matrices of a model, AdamW for the rest of it, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

RMS_OF_ADAMW = 0.2
"""What the root mean square of an AdamW step is, in learning rates (Liu 2025, "Muon is Scalable for LLM Training")."""


def hidden_matrices(model: nn.Module) -> set[int]:
    """ids of the trained matrices between embedding and output head. A single row or column is no matrix."""
    outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        if head is not None:
            outside |= {id(parameter) for parameter in head.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad)
    return {id(p) for p in trained if p.ndim == 2 and min(p.shape) > 1 and id(p) not in outside}


class PreciseMuon(Muon):
    """torch's Muon with the orthogonalisation in float32. In bfloat16, as torch has it, gradients that differ in their last
    bit (another cut into micro-batches, another number of ranks) would give weights that differ by hundredths of a step.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = state["momentum_buffer"].lerp_(parameter.grad, 1.0 - group["momentum"])
        direction = orthogonal(parameter.grad.lerp(momentum, group["momentum"]), group["ns_coefficients"])
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * RMS_OF_ADAMW * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int = 5) -> Tensor:
    """Nearly U V^T of the matrix's U S V^T, by Newton and Schulz's iteration; singular values come out near 1."""
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonWithAdamW(Optimizer):
    """Both halves step together; `param_groups` are those of Muon, then those of AdamW.

    Muon's updates have the size of AdamW's, so one learning rate and one weight decay serve both. It needs whole matrices:
    neither parameters nor gradients may be sharded or flattened.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.halves: list[Optimizer] = []
        if matrices:
            self.halves.append(PreciseMuon(matrices, lr=lr))
        if others:
            self.halves.append(AdamW(others, lr=lr, betas=betas, eps=eps, fused=True))
        super().__init__([*matrices, *others], {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        """The groups of the halves themselves, so that a rate set on them arrives."""
        self.param_groups = [group for half in self.halves for group in half.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for half in self.halves:
            half.step()

    def state_dict(self) -> dict[str, Any]:
        return {"halves": [half.state_dict() for half in self.halves]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for half, state in zip(self.halves, state_dict["halves"], strict=True):
            half.load_state_dict(state)
        self._share_groups()
