"""NCCL without GPUs: everything of vLLM's broadcast is real but the communicator, which is gloo's, and the streams."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class GlooGroup:
    """Stands for vLLM's PyNcclCommunicator: made from the same meeting, used through the same calls."""

    disabled = False

    def __init__(self, group: Any, device: Any) -> None:
        self.device = torch.device("cpu")
        store = dist.PrefixStore("gloo", group.store)
        self._gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=30))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self.disabled = True


class NoStream:
    def synchronize(self) -> None:
        pass


def install() -> None:
    """In this process, until it ends."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    pynccl.PyNcclCommunicator = GlooGroup
    packed_tensor._get_streams = lambda device, count: tuple(NoStream() for _ in range(count))
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]


def main_of_children() -> None:
    """The processes that this one spawns import this file as their main module, before anything of vLLM."""
    import importlib.util

    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("gloo")


if __name__ == "__mp_main__":
    import agentrl.engines.vllm_child  # noqa: F401

    install()
