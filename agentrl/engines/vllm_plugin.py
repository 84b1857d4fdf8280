"""What agentrl adds to vLLM, in every process that vLLM starts: its weight transfer backends, one for each transport."""

from __future__ import annotations

CLASSES = {
    "shm": ("vllm_transfer", "SharedMemoryTransfer"),
    "nccl": ("vllm_gpu_transfer", "NcclTransfer"),
    "ipc": ("vllm_gpu_transfer", "IpcTransfer"),
}


def backend(transport: str) -> str:
    """What vLLM knows a transport by."""
    return f"agentrl_{transport}"


def register() -> None:
    """Entry point `vllm.general_plugins`. May be called any number of times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, (module, name) in CLASSES.items():
        if backend(transport) not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend(transport), f"agentrl.engines.{module}", name)
