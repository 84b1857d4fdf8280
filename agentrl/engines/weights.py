"""Weights from trainer to engine: the manifest that travels, and the transport through shared memory.

The blocks are POSIX shared memory on the trainer's host. The publisher owns them: it unlinks them in `release`, and the
resource tracker of its process tree does so when it dies. Readers map them and never unlink.
"""

from __future__ import annotations

import mmap
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import EngineError

SHM_DIR = Path("/dev/shm")
_ALIGNMENT = 64
_SAMPLED_BYTES = 4096


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies: `offset` bytes into block number `block`, or into what is sent. `dtype` is torch's name, as in
    "float32".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block: int
    offset: int


@dataclass(frozen=True)
class WeightSource:
    """What an engine needs to get one version of the weights; plain values, so it travels anywhere.

    `transport` says how they are fetched, and `fetch` holds what that needs besides. shm: the `blocks`; their `fingerprint`
    covers every name, shape and each tensor's first 4 KiB, so that one that was reused or misread differs. nccl: where the group
    meets and the engine's rank in it. ipc: the handle of each tensor.
    """

    version: int
    blocks: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    fingerprint: int
    transport: str = "shm"
    fetch: dict[str, Any] = field(default_factory=dict)

    def with_fetch(self, **more: Any) -> WeightSource:
        """The same with more in `fetch`."""
        return replace(self, fetch={**self.fetch, **more})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WeightSource:
        """The inverse of `to_dict`, also after a passage through msgpack or JSON (tuples become lists)."""
        tensors = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in values["tensors"])
        return cls(**{**values, "blocks": tuple(values["blocks"]), "tensors": tensors})


class Publisher(Protocol):
    """The trainer's side of a transport, on rank 0. One version at a time: `release` ends what `publish` began."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """Offer the tensors, under checkpoint names. Raises EngineError for an empty one and for a name given twice."""
        ...

    def send(self, source: WeightSource) -> None:
        """Take part while engines load, where the transport wants it. `source` is as an engine was told it."""
        ...

    def release(self) -> None:
        """Every engine has what was published, or will not get it."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def manifest(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """The specs of tensors that lie, or are sent, one after the other. Raises EngineError as `Publisher.publish` does."""
    specs: dict[str, TensorSpec] = {}
    offset = 0
    for name, tensor in tensors:
        refuse_twice(name, specs)
        specs[name] = spec_of(name, tensor, 0, offset)
        offset += tensor.nbytes
    return tuple(specs.values())


def refuse_twice(name: str, specs: Mapping[str, TensorSpec]) -> None:
    if name in specs:
        raise EngineError(f"the weight {name} was published twice")


def spec_of(name: str, tensor: torch.Tensor, block: int, offset: int) -> TensorSpec:
    """Raises EngineError for a tensor of size 0."""
    if tensor.numel() == 0:
        raise EngineError(f"the weight {name} has size 0: was a sharded parameter published without its gather?")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), tensor.nbytes, block, offset)


class WeightPublisher:
    """Writes one version of the weights at a time. Tensors may come from any device, one after the other.

    A block holds `block_bytes`, or one larger tensor; only what is written takes memory. Use as a context manager, or
    call `release`.
    """

    def __init__(self, block_bytes: int = 256 * 2**20) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[shared_memory.SharedMemory] = []
        self._filled = 0

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """Copy the tensors into shared memory; what was published before is released first.

        Each tensor is copied before the next is asked for, so a sharded one may be gathered just for its turn. Raises
        EngineError for a tensor of size 0 (a shard whose gather was forgotten), for a name given twice, and when shared
        memory is full.
        """
        self.release()
        specs: dict[str, TensorSpec] = {}
        for name, tensor in tensors:
            refuse_twice(name, specs)
            specs[name] = self._write(name, tensor.detach())
        names = tuple(block.name for block in self._blocks)
        nbytes = sum(_aligned(spec.nbytes) for spec in specs.values())
        unsigned = WeightSource(version, names, tuple(specs.values()), nbytes, fingerprint=0)
        return replace(unsigned, fingerprint=WeightReader(unsigned).fingerprint())

    def _write(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        spec = spec_of(name, tensor, 0, 0)
        if not self._blocks or self._filled + tensor.nbytes > self._blocks[-1].size:
            self._add_block(max(self._block_bytes, tensor.nbytes))
        _refuse_full(tensor.nbytes)
        target = torch.frombuffer(self._blocks[-1].buf, dtype=tensor.dtype, count=tensor.numel(), offset=self._filled)
        target.copy_(tensor.reshape(-1))
        spec = replace(spec, block=len(self._blocks) - 1, offset=self._filled)
        self._filled += _aligned(tensor.nbytes)
        return spec

    def _add_block(self, size: int) -> None:
        self._blocks.append(shared_memory.SharedMemory(create=True, size=size))
        self._filled = 0

    def release(self) -> None:
        """Unlink what was published. Engines that are still reading keep their mapping until they are done."""
        while self._blocks:
            block = self._blocks.pop()
            block.close()
            block.unlink()

    def send(self, source: WeightSource) -> None:
        """Nothing: engines read the blocks themselves."""

    def close(self) -> None:
        """Unlink what was published."""
        self.release()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class WeightReader:
    """The tensors of a source, as views into private copy-on-write mappings, valid until `close`."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._maps = [_map(name) for name in source.blocks]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._source.tensors:
            dtype = getattr(torch, spec.dtype)
            count = torch.Size(spec.shape).numel()
            flat = torch.frombuffer(self._maps[spec.block], dtype=dtype, count=count, offset=spec.offset)
            yield spec.name, flat.view(spec.shape)

    def fingerprint(self) -> int:
        total = 0
        for spec, (name, tensor) in zip(self._source.tensors, self.tensors(), strict=True):
            total = zlib.crc32(f"{name}{spec.shape}{spec.dtype}".encode(), total)
            data = tensor.view(-1).view(torch.uint8)[:_SAMPLED_BYTES]
            total = zlib.crc32(data.numpy().tobytes(), total)
        return total

    def close(self) -> None:
        """Forget the mappings; the memory goes when the last view does."""
        self._maps = []


def _map(name: str) -> mmap.mmap:
    """Map a block without the resource tracker, which would unlink it when the reading process ends."""
    try:
        with (SHM_DIR / name).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise EngineError(f"the shared memory block {name} of the published weights is gone") from error


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _refuse_full(nbytes: int) -> None:
    """Writing past the end of a full shared memory kills the process with SIGBUS; say so while it can be said."""
    free = shutil.disk_usage(SHM_DIR).free
    if free < nbytes:
        raise EngineError(f"{SHM_DIR} has {free >> 20} MiB left, the weights need {nbytes >> 20} MiB more")
