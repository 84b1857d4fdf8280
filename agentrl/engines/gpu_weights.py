"""Weights from trainer to engine on GPUs: broadcast over NCCL, or handed over within one GPU. Both are vLLM's transfers."""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import EngineError
from .weights import Publisher, WeightPublisher, WeightSource, manifest

BUCKET_BYTES = 256 * 2**20
"""What is packed into one broadcast; two are under way at a time."""
JOIN_S = 60.0
"""How long rank 0 of a group waits for the others: they come as soon as they have checked the names."""

Named = list[tuple[str, torch.Tensor]]


def make_publisher(transport: str, timeout_s: float) -> Publisher:
    """The trainer's side of a transport; shm where nobody has decided. `timeout_s` bounds what is sent."""
    if transport == "nccl":
        return NcclPublisher(timeout_s)
    return IpcPublisher() if transport == "ipc" else WeightPublisher()


class NcclPublisher:
    """Rank 0 of a group with the workers of the engines. `publish` offers a place to meet, `send` meets whom the source tells of
    there and broadcasts, packed into buckets.

    A group is kept for the next version. After a failure or a timeout it is aborted, and the next update makes another.
    """

    def __init__(self, timeout_s: float, host: str | None = None) -> None:
        self._timeout_s = timeout_s
        self._host = host
        self._tensors: Named = []
        self._door: socket.socket | None = None
        self._group: Any = None
        self._rendezvous: tuple[str, int, int] | None = None

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """Nothing is copied: the tensors must stay as they are until `release`."""
        # Packed bytes are read in place as their type: what is wider comes first, so that everything lies aligned.
        found = [(name, tensor.detach()) for name, tensor in tensors]
        ordered = sorted(found, key=lambda item: -item[1].element_size())
        specs = manifest(ordered)
        self._tensors = ordered
        address, port = self._open_door()
        fetch = {"address": address, "port": port, "bucket_bytes": BUCKET_BYTES}
        return WeightSource(version, (), specs, sum(spec.nbytes for spec in specs), 0, "nccl", fetch)

    def _open_door(self) -> tuple[str, int]:
        """Where the next group can meet: a port that the system chose, and that this process holds until then."""
        if self._host is None:
            import ray

            self._host = ray.util.get_node_ip_address()
        if self._door is None:
            self._door = socket.create_server((self._host, 0), backlog=1024)
        return self._host, self._door.getsockname()[1]

    def send(self, source: WeightSource) -> None:
        """Broadcast what was published to the group that `source` tells of. Raises EngineError, the group then is gone."""
        failed: list[BaseException] = []

        def work() -> None:
            try:
                self._broadcast(source)
            except BaseException as error:  # the fault boundary to NCCL: told below
                failed.append(error)

        thread = threading.Thread(target=work, name="weights", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not thread.is_alive() and not failed:
            return
        why = f"it took longer than {self._timeout_s:g} s" if not failed else f"{type(failed[0]).__name__}: {failed[0]}"
        self._leave()
        raise EngineError(f"the trainer could not send weight version {source.version}: {why}")

    def _broadcast(self, source: WeightSource) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        group = self._joined(source.fetch)
        packed_nccl_broadcast_producer(
            iterator=iter(self._tensors),
            group=group,
            src=0,
            post_iter_func=lambda item: item[1].to(group.device),
            buffer_size_bytes=source.fetch["bucket_bytes"],
        )

    def _joined(self, fetch: dict[str, Any]) -> Any:
        rendezvous = (fetch["address"], fetch["port"], fetch["world_size"])
        if rendezvous != self._rendezvous:
            self._leave()
            if self._door is None or self._door.getsockname()[1] != fetch["port"]:
                raise EngineError(f"nobody waits at {fetch['address']}:{fetch['port']} any more")
            door, self._door = self._door, None
            self._group = open_group(*rendezvous, door)
            self._rendezvous = rendezvous
        return self._group

    def _leave(self) -> None:
        group, self._group, self._rendezvous = self._group, None, None
        if group is not None:
            group.destroy()

    def release(self) -> None:
        """Forget the tensors."""
        self._tensors = []

    def close(self) -> None:
        self.release()
        self._leave()
        if self._door is not None:
            self._door.close()
            self._door = None


def open_group(address: str, port: int, world_size: int, door: socket.socket) -> Any:
    """Rank 0 of a communicator of vLLM's, on the current GPU. `door` listens at the address, and belongs to the group now."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    meeting = StatelessProcessGroup.create(
        address, port, 0, world_size, store_timeout=int(JOIN_S), listen_socket=door
    )  # fmt: skip
    with unpinned_nccl_env():
        return usable(PyNcclCommunicator(meeting, device=torch.accelerator.current_device_index()))


def usable(group: Any) -> Any:
    """The communicator. Raises EngineError for one without NCCL, whose calls would do nothing."""
    if group.disabled:
        raise EngineError("NCCL cannot be loaded here, so no weights can be sent with it: use --engine.transport shm")
    return group


class IpcPublisher:
    """Copies on the GPU that the engine uses as well: `publish` makes them, the engine opens them by their handles.

    `export(tensor)` = the arguments with which another process opens it; `gpu()` = the device, and its name on the machine.
    """

    def __init__(
        self,
        export: Callable[[torch.Tensor], tuple[Any, ...]] | None = None,
        gpu: Callable[[], tuple[torch.device, str]] | None = None,
    ) -> None:
        self._export = export or _cuda_handle
        self._gpu = gpu or _current_gpu
        self._copies: Named = []

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """The copies stay until `release`, whatever becomes of the tensors: the trainer may leave the GPU."""
        self.release()
        device, name = self._gpu()
        contiguous = torch.contiguous_format
        self._copies = [
            (key, tensor.detach().to(device).clone(memory_format=contiguous)) for key, tensor in tensors
        ]  # fmt: skip
        specs = manifest(self._copies)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        handles = [{name: self._export(copy)} for _, copy in self._copies]
        fetch = {"handles": base64.b64encode(pickle.dumps(handles)).decode()}
        return WeightSource(version, (), specs, sum(spec.nbytes for spec in specs), 0, "ipc", fetch)

    def send(self, source: WeightSource) -> None:
        """Nothing: the engine opens the copies itself."""

    def release(self) -> None:
        """Free the copies, so that the engine has the room for its KV cache."""
        if self._copies:
            self._copies = []
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()

    def close(self) -> None:
        self.release()


def _cuda_handle(tensor: torch.Tensor) -> tuple[Any, ...]:
    from torch.multiprocessing.reductions import reduce_tensor

    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]
    return arguments


def _current_gpu() -> tuple[torch.device, str]:
    index = torch.cuda.current_device()
    return torch.device("cuda", index), str(torch.cuda.get_device_properties(index).uuid)
