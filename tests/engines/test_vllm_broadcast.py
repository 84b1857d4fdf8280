"""Weights broadcast to a real vLLM engine and to a second one, over gloo in NCCL's place; IPC with the GPU's memory played."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config import Config
from agentrl.engine import GenerationRequest, Health, Sampling
from agentrl.engines import gpu_weights
from agentrl.engines.fleet import EngineFleet
from agentrl.engines.gpu_weights import IpcPublisher, NcclPublisher
from agentrl.engines.vllm_actor import RayEngine, VLLMActor, spawn_engine
from agentrl.engines.vllm_options import VLLMOptions
from agentrl.engines.weights import WeightSource
from agentrl.errors import EngineError
from agentrl.weight_sync import WeightSync

from . import gloo, reference, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE = str(Path(gloo.__file__).parent)


class GlooActor(VLLMActor):
    """The engine's actor, whose child processes take gloo for NCCL."""

    def __init__(self, options: VLLMOptions, version: int) -> None:
        super().__init__(options, version)
        import importlib.util
        import sys

        sys.path.insert(0, HERE)
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("gloo")


class Model(torch.nn.Module):
    """What a worker holds, as far as a transfer looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


def worker(kind: Any, folder: Path) -> Any:
    """A transfer of ours with nothing of vLLM's engine around it, as its only worker."""
    transfer = object.__new__(kind)
    transfer.device = torch.device("cpu")
    transfer.model = Model()
    hf = SimpleNamespace(tie_word_embeddings=False, get_text_config=lambda: SimpleNamespace(tie_word_embeddings=False))
    transfer.model_config = SimpleNamespace(model=str(folder), hf_config=hf)
    transfer.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    transfer.model_update_group = None
    return transfer


class Here:
    """A second engine, in this process: the worker's half of an update and nothing else."""

    def __init__(self, transfer: Any) -> None:
        self.transfer = transfer
        self.version = 0
        self.dead = False

    async def pause(self, mode: Any) -> None:
        if self.dead:
            raise EngineError("gone")

    async def resume(self) -> None:
        await self.pause("keep")

    async def update_weights(self, source: WeightSource, version: int) -> None:
        await asyncio.to_thread(self._load, source)
        self.version = version

    def _load(self, source: WeightSource) -> None:
        try:
            self.transfer.init_transfer_engine(self.transfer.init_info_cls(source.to_dict()))
            self.transfer.update_weights({})
        except ValueError as error:
            raise EngineError(str(error)) from error

    async def health(self) -> Health:
        return Health(not self.dead, self.version)


class Trainer:
    """A model and its publisher; one weight can be left out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.publisher = NcclPublisher(60.0, host="127.0.0.1")
        self.left_out = ""

    async def publish(self, version: int) -> WeightSource:
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if name != self.left_out}
        return self.publisher.publish(weights.items(), version)

    async def send(self, source: WeightSource) -> None:
        await asyncio.to_thread(self.publisher.send, source)

    async def release(self, source: Any) -> None:
        self.publisher.release()


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process too takes gloo for NCCL, for the time of a test."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    for owner, name in (
        (pynccl, "PyNcclCommunicator"),
        (packed_tensor, "_get_streams"),
        (torch.cuda, "stream"),
        (torch.accelerator, "current_device_index"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    gloo.install()
    yield


async def test_two_engines_one_lost_one_new(
    tmp_path: Path, ray_cluster: None, doubled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version that is broadcast is what the engines hold: to the bit in the second, by log-probabilities in vLLM."""
    import sys

    from ray import cloudpickle

    from agentrl.engines.vllm_gpu_transfer import NcclTransfer

    monkeypatch.setattr(gpu_weights, "JOIN_S", 2.0)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    model = tiny.text_model(tmp_path, tied=False)
    options = VLLMOptions(
        str(tmp_path), transport="nccl", max_model_len=256, max_num_seqs=4, kv_cache_gb=0.1, start_timeout_s=240
    )
    real: RayEngine = spawn_engine(options, kind=GlooActor)
    second = Here(worker(NcclTransfer, tmp_path))
    trainer, fleet = Trainer(model), EngineFleet([real, second])  # type: ignore[list-item]
    sync = WeightSync(Config(), trainer, fleet, transport="nccl")  # type: ignore[arg-type]
    fleet.lost = lambda index, why: fleet.out.add(index)

    async def check(*others: Here) -> None:
        """The engines hold what the model holds."""
        made = await real.generate(GenerationRequest((1, 2, 3), Sampling(max_new_tokens=8, seed=1)))
        assert reference.worst(made, reference.hf_logprobs(model, (1, 2, 3), made.token_ids)) < 1e-4
        assert {span.version for span in made.version_spans} == {sync.version}
        for one in others:
            state, loaded = model.state_dict(), one.transfer.model.loaded
            assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)

    try:
        await real.start()
        trainer.left_out = "model.norm.weight"
        with pytest.raises(EngineError, match=r"1 missing \(model.norm.weight\)"):
            await sync.publish(1)
        trainer.left_out = ""
        assert (await real.health()).ok and sync.version == 0
        for version in (1, 2):
            reference.disturb(model, version)
            await sync.publish(version)
            await check(second)
        port = second.transfer._rendezvous[1]
        second.dead = True
        reference.disturb(model, 3)
        await sync.publish(3)
        assert fleet.out == {1}
        await check()
        new = Here(worker(NcclTransfer, tmp_path))
        await sync.give(1, new)  # type: ignore[arg-type]
        await check(new)
        reference.disturb(model, 4)
        await sync.publish(4)
        await check(new)
        assert new.transfer._rendezvous[1] not in (port, 0)
        trainer.publisher.close()
    finally:
        await real.close()


def test_ipc_opens_the_copies_by_their_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own receiver, with an address in this process in the place of a handle."""
    from vllm.distributed.weight_transfer import ipc_engine

    from agentrl.engines.vllm_gpu_transfer import IpcTransfer

    model = tiny.text_model(tmp_path, tied=False)
    exported: dict[int, torch.Tensor] = {}

    def export(tensor: torch.Tensor) -> tuple[Any, ...]:
        exported[len(exported)] = tensor
        return (len(exported) - 1, *range(1, 8))

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", lambda key, *rest: exported[key])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    publisher = IpcPublisher(export, lambda: (torch.device("cpu"), "GPU-1"))
    source = publisher.publish(model.state_dict().items(), 1)
    transfer = worker(IpcTransfer, tmp_path)
    transfer.init_transfer_engine(transfer.init_info_cls(source.to_dict()))
    transfer.update_weights({})
    state, loaded = model.state_dict(), transfer.model.loaded
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    with pytest.raises(ValueError, match="do not fit"):
        transfer.init_transfer_engine(transfer.init_info_cls(publisher.publish([("w", torch.ones(1))], 2).to_dict()))
    with pytest.raises(RuntimeError, match="not announced"):
        transfer.update_weights({})
    publisher.close()
    gc.collect()
