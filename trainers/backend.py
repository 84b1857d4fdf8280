"""DeepSpeed under the trainer: one rank's process group, engine and optimizer steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import ParallelSection
from ..errors import ConfigError
from .muon import MuonWithAdamW

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `store` = (host, port) of rank 0's rendezvous store; None = a world of one, with no port."""

    rank: int = 0
    ranks: int = 1
    store: tuple[str, int] | None = None


def join(place: Place, device: torch.device) -> None:
    """Enter the process group of the run, unless this process is in one."""
    if dist.is_initialized():
        return
    if place.store is None:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(*place.store, world_size=place.ranks, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=place.rank, world_size=place.ranks
    )


@dataclass(frozen=True)
class Offload:
    """What is kept in CPU memory: `optimizer` = its state and the float32 masters, `params` = weights that are not in use."""

    optimizer: bool = False
    params: bool = False

    @classmethod
    def of(cls, parallel: ParallelSection) -> Offload:
        """As a run is told."""
        return cls(parallel.offload_optimizer, parallel.offload_params)


class Backend:
    """A module under DeepSpeed. Exactly one optimizer step for each `backward(…, last=True)` followed by `step`.

    ZeRO stages 1 to 3 shard optimizer state, gradients, weights. In bfloat16 stage 0 runs as stage 1, whose optimizer
    keeps float32 master weights and sums gradients in float32.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        *,
        stage: int,
        max_norm: float,
        dtype: torch.dtype,
        offload: Offload = Offload(),
    ) -> None:
        import deepspeed

        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it; a rank sees only its own device
        deepspeed.ops.__compatible_ops__ = {}  # else its gloo backend compiles a kernel for 95 s; torch's operators do
        low = dtype == torch.bfloat16
        self.stage = max(stage, 1) if low else stage
        if self.stage and isinstance(optimizer, MuonWithAdamW):
            raise ConfigError("--optim.name muon works on whole matrices: use --model.dtype float32, or adamw.")
        self._max_norm = max_norm
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=_settings(self.stage, max_norm, low, offload)
        )

    def __call__(self, *inputs: Any) -> Any:
        return self.engine(*inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's share of the loss; `last` ends the update's accumulation on every rank."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * dist.get_world_size())  # DeepSpeed averages over ranks; the shares add up

    def step(self, lr: float) -> float:
        """Clip, step and clear the gradients; the gradient's norm before the clip. Not finite: cleared, no step made."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.stage:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            if not math.isfinite(norm) and self.stage < 3:
                self._forget_sums()
            return norm
        norm = float(nn.utils.get_total_norm([p.grad for p in self._parameters() if p.grad is not None]))
        if math.isfinite(norm):
            self._clip(norm)
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm

    def _forget_sums(self) -> None:
        """With an offloaded optimizer DeepSpeed keeps the sums of a skipped step, and would add the next gradients to them."""
        sums = self.optimizer.averaged_gradients
        sums.update(dict.fromkeys(sums))

    def _clip(self, norm: float) -> None:
        if self._max_norm and norm > self._max_norm:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._max_norm / (norm + 1e-6))

    def _parameters(self) -> Iterator[nn.Parameter]:
        yield from self.engine.module.parameters()

    @contextmanager
    def gathered(self, *tensors: Tensor) -> Iterator[None]:
        """Parameters whole on every rank, for reading. All ranks must enter together."""
        import deepspeed

        sharded = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        with deepspeed.zero.GatheredParameters(sharded, enabled=self.stage == 3 and bool(sharded)):
            yield

    @contextmanager
    def loading(self, universal: bool) -> Iterator[None]:
        """Inside, a checkpoint is read as one for any number of ranks, where it is `universal`. The optimizer's state comes from
        it, its options (weight decay, betas, …) are those it was made with.
        """
        config = self.engine._config
        before, config.load_universal_checkpoint = config.load_universal_checkpoint, universal
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        try:
            yield
        finally:
            config.load_universal_checkpoint = before
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)
        if universal:
            self._count_apart()

    def _count_apart(self) -> None:
        """Of a universal checkpoint DeepSpeed's stage 3 gives all groups one counter of steps, which each would raise."""
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def offload(self) -> None:
        """Weights, gradients and optimizer state to CPU memory, until `onload`. Without a GPU they are there."""
        if not torch.cuda.is_available():
            return
        if self.stage:
            self.engine.offload_states()
        else:
            self._move("cpu")
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Back to the GPU."""
        if not torch.cuda.is_available():
            return
        if self.stage:
            self.engine.reload_states()
        else:
            self._move("cuda")

    def _move(self, device: str) -> None:
        self.engine.module.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device) if isinstance(value, Tensor) and value.dim() else value

    def close(self) -> None:
        """Leave the process group."""
        self.engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


def _settings(stage: int, max_norm: float, low: bool, offload: Offload) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload.params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": max_norm if stage else 0.0,  # DeepSpeed's default is not 0
    }
    if low:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


def gather(value: T) -> list[T]:
    """The value of every rank, in order of rank."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
