"""vLLM's worker side of weight updates on GPUs: its own NCCL and IPC transfers, with names and shapes checked before."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from .gpu_weights import usable
from .vllm_transfer import CheckedTransfer
from .weights import WeightSource


class NcclTransfer(CheckedTransfer, NCCLWeightTransferEngine):  # type: ignore[misc]
    """The announcement tells where the group meets; one that this worker is in already is kept."""

    _rendezvous: tuple[Any, ...] = ()

    def attach(self, source: WeightSource) -> None:
        fetch = source.fetch
        rendezvous = (fetch["address"], fetch["port"], fetch["world_size"])
        if rendezvous == self._rendezvous:
            return
        self.shutdown()
        init = NCCLWeightTransferInitInfo(
            master_address=fetch["address"],
            master_port=fetch["port"],
            rank_offset=fetch["rank_offset"],
            world_size=fetch["world_size"],
            packed=True,
            packed_buffer_size_bytes=fetch["bucket_bytes"],
        )
        NCCLWeightTransferEngine.init_transfer_engine(self, init)
        usable(self.model_update_group)
        self._rendezvous = rendezvous

    def receive(self, source: WeightSource) -> None:
        NCCLWeightTransferEngine.receive_weights(self, NCCLWeightTransferUpdateInfo(**described(source)))

    def shutdown(self) -> None:
        """Leave the group."""
        self._rendezvous = ()
        NCCLWeightTransferEngine.shutdown(self)


class IpcTransfer(CheckedTransfer, IPCWeightTransferEngine):  # type: ignore[misc]
    """The announcement brings a handle for each tensor on the GPU that worker and trainer share."""

    def attach(self, source: WeightSource) -> None:
        IPCWeightTransferEngine.init_transfer_engine(self, IPCWeightTransferInitInfo(packed=False))

    def receive(self, source: WeightSource) -> None:
        handles = pickle.loads(base64.b64decode(source.fetch["handles"]))
        update = IPCWeightTransferUpdateInfo(**described(source), ipc_handles=handles)
        IPCWeightTransferEngine.receive_weights(self, update)


def described(source: WeightSource) -> dict[str, Any]:
    """What vLLM calls the manifest."""
    return {
        "names": [spec.name for spec in source.tensors],
        "dtype_names": [spec.dtype for spec in source.tensors],
        "shapes": [list(spec.shape) for spec in source.tensors],
    }
