"""What agentrl adds to vLLM, in every process that vLLM starts: the weight transfer backend over shared memory."""

from __future__ import annotations

BACKEND = "agentrl_shm"


def register() -> None:
    """Entry point `vllm.general_plugins`. May be called any number of times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "agentrl.engines.vllm_transfer", "SharedMemoryTransfer")
