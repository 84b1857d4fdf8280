"""An exponential moving average of the weights (Polyak 1992), beside the ones that are trained and sampled from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DataError

Shard = tuple[tuple[int, ...], Tensor]
"""A parameter's whole shape and the part of it, flat, that one rank keeps the average of."""


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights, in float32, after each update that was made.

    Of trained parameters alone: of LoRA the two factors are averaged, not their product. Rank 0 keeps all of it; where
    weights are sharded (ZeRO stage 3), each rank that of its own shards. Starts at the weights.
    """

    def __init__(self, model: nn.Module, decay: float, *, sharded: bool) -> None:
        self._decay = decay
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sharded = sharded
        self._parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            self._shapes[name] = tuple(parameter.ds_shape) if sharded else tuple(parameter.shape)
        keeps = sharded or dist.get_rank() == 0
        self._average = {name: tensor.float().clone() for name, tensor in self._live().items()} if keeps else {}
        self._shared = not sharded and dist.get_world_size() > 1

    def _live(self) -> dict[str, Tensor]:
        """The trained weights where they lie now: they move when a GPU is left to the engines and taken back."""
        return {name: p.ds_tensor if self._sharded else p.data for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take one more set of weights in."""
        live = self._live()
        for name, average in self._average.items():
            average.lerp_(live[name].float(), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model holds the average, on every rank; afterwards its own weights, bit for bit. For reading, by all
        ranks together.
        """
        kept = {name: tensor.clone() for name, tensor in self._live().items()}
        try:
            self._write(self._average)
            for tensor in self._live().values() if self._shared else ():
                dist.broadcast(tensor, 0)
            yield
        finally:
            self._write(kept)

    def _write(self, values: dict[str, Tensor]) -> None:
        live = self._live()
        for name, value in values.items():
            live[name].copy_(value)
        for parameter in self._parameters.values() if self._sharded else ():
            parameter.partition()  # DeepSpeed keeps small ones gathered, and would not look at their shards again

    def save(self, folder: Path) -> None:
        """This rank's part."""
        if self._average:
            shards = {name: (self._shapes[name], tensor.flatten()) for name, tensor in self._average.items()}
            torch.save(shards, _file(folder, dist.get_rank()))

    def load(self, folder: Path, *, joined: bool = False) -> None:
        """What `save` wrote with as many ranks, or `join_average` of any number. Raises DataError where there is nothing."""
        if not self._average:
            return
        rank = dist.get_rank()
        file = _file(folder, 0 if joined else rank)
        if not file.is_file():
            raise DataError(f"{folder} holds no averaged weights: it was written without --optim.ema")
        stored: dict[str, Shard] = torch.load(file, weights_only=True)
        for name, (_, flat) in stored.items():
            own = self._average[name].view(-1)
            part = flat[rank * len(own) :][: len(own)] if joined else flat
            own[: len(part)].copy_(part)


def read_average(folder: Path) -> dict[str, Tensor]:
    """The whole average of a checkpoint, by parameter name; empty when there is none."""
    files = sorted(folder.glob("ema_rank_*.pt"), key=lambda file: int(file.stem.removeprefix("ema_rank_")))
    parts: Sequence[dict[str, Shard]] = [torch.load(file, weights_only=True) for file in files]
    whole: dict[str, Tensor] = {}
    for name, (shape, _) in parts[0].items() if parts else ():
        flat = torch.cat([part[name][1] for part in parts])
        whole[name] = flat[: torch.Size(shape).numel()].view(shape)
    return whole


def join_average(folder: Path, out: Path) -> None:
    """Write the average of a checkpoint whole, for any number of ranks; nothing when there is none."""
    whole = {name: (tuple(tensor.shape), tensor.flatten().clone()) for name, tensor in read_average(folder).items()}
    for file in out.glob("ema_rank_*.pt"):
        file.unlink()
    if whole:
        torch.save(whole, _file(out, 0))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"ema_rank_{rank}.pt"
