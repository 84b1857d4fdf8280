"""Which transport a run has, who stands in which group, and the order of calls of a broadcast; no GPU is needed for that."""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
from typing import Any

import pytest
import torch

from agentrl import ConfigError, EngineError, Reply, ScriptedEngine
from agentrl.config import Config
from agentrl.config.checks import check_engine
from agentrl.engine import Health
from agentrl.engines import gpu_weights
from agentrl.engines.broadcast import Broadcast
from agentrl.engines.fleet import EngineFleet
from agentrl.engines.gpu_weights import IpcPublisher, NcclPublisher, make_publisher
from agentrl.engines.transport import check_transport, transport_of, workers_of_engine
from agentrl.engines.weights import WeightPublisher, WeightSource
from agentrl.weight_sync import WeightSync

OFFER = {"address": "10.0.0.1", "port": 4000, "bucket_bytes": 64}


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize(
    ("gpus", "sections", "transport"),
    [
        (0, {}, "shm"),
        (4, {}, "nccl"),
        (1, {"engine": {"colocated": True}}, "ipc"),
        (0, {"engine": {"colocated": True}}, "shm"),
        (4, {"engine": {"gpus": 0}}, "shm"),
        (4, {"parallel": {"gpus": 0}}, "shm"),
        (1, {"engine": {"gpus": 0.5}, "parallel": {"gpus": 0.5}}, "shm"),
        (4, {"engine": {"transport": "shm"}}, "shm"),
        (4, {"engine": {"name": "scripted"}}, "shm"),
        (4, {"run": {"replay": "runs/x/rollouts"}}, "shm"),
    ],
)
def test_auto_is_what_the_cluster_has(gpus: float, sections: dict[str, Any], transport: str) -> None:
    chosen = config(**sections)
    check_transport(chosen, gpus)
    assert transport_of(chosen, gpus) == transport


@pytest.mark.parametrize(
    ("gpus", "engine", "parallel", "said"),
    [
        (0, {"transport": "nccl"}, {}, "--engine.transport nccl moves weights from GPU to GPU: there is none"),
        (0, {"transport": "ipc", "colocated": True}, {}, "--engine.transport ipc .* there is none"),
        (2, {"transport": "nccl", "gpus": 0}, {}, "--engine.gpus 0 the engines have none"),
        (2, {"transport": "nccl"}, {"gpus": 0}, "--parallel.gpus 0 the trainer has none"),
        (2, {"transport": "nccl"}, {"gpus": 0.5}, "whole GPUs .* --parallel.gpus 0.5 is a part"),
    ],
)
def test_what_this_cluster_cannot_have_is_refused(
    gpus: float, engine: dict[str, Any], parallel: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_transport(config(engine=engine, parallel=parallel), gpus)


@pytest.mark.parametrize(
    ("engine", "run", "said"),
    [
        ({"name": "scripted", "transport": "shm"}, {}, "not used with --engine scripted"),
        ({"transport": "nccl"}, {"replay": "x"}, "not used with --replay"),
        ({"transport": "ipc"}, {}, "needs --engine.colocated"),
        ({"transport": "nccl", "colocated": True}, {}, "for GPUs apart"),
    ],
)
def test_what_no_cluster_can_have_is_refused_before_there_is_one(
    engine: dict[str, Any], run: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_engine(config(engine=engine, run=run), ("vllm", "scripted"))


def test_an_engine_has_a_worker_for_each_device() -> None:
    assert workers_of_engine(config()) == 1
    assert workers_of_engine(config(engine={"args": ["tensor_parallel_size=2", "data-parallel-size=3"]})) == 6


async def nothing(source: WeightSource) -> None:
    """A trainer that sends at once."""


def test_a_group_lasts_as_long_as_its_engines() -> None:
    """Rank 0 is the trainer's, every engine has as many ranks as workers; the address is that of the update that made the
    group.
    """
    broadcast, (one, two, three) = Broadcast(nothing, workers=2), (object(), object(), object())

    def parts(port: int, *engines: object) -> list[tuple[int, int, int]]:
        source = WeightSource(1, (), (), 0, 0, "nccl", {**OFFER, "port": port})
        found = [part.fetch for part in broadcast.parts(source, engines)]
        return [(fetch["port"], fetch["rank_offset"], fetch["world_size"]) for fetch in found]

    assert parts(1, one, two) == [(1, 1, 5), (1, 3, 5)]
    assert parts(2, one, two) == [(1, 1, 5), (1, 3, 5)]
    assert parts(3, three) == [(3, 1, 3)]
    assert parts(4, one, three) == [(4, 1, 5), (4, 3, 5)]
    broadcast.forget()
    assert parts(5, one, three) == [(5, 1, 5), (5, 3, 5)]


class Receiver(ScriptedEngine):
    """An engine that loads when the trainer sends, as in a broadcast; `refuses` before, `dies` on the way."""

    def __init__(self, meeting: asyncio.Event) -> None:
        super().__init__(lambda request: Reply([1]))
        self.meeting = meeting
        self.told: list[WeightSource] = []
        self.refuses = self.dies = self.dead = False

    async def update_weights(self, source: Any, version: int) -> None:
        self.told.append(source)
        if self.refuses:
            raise EngineError("no such name")
        await asyncio.wait_for(self.meeting.wait(), 5)
        if self.dies:
            self.dead = True
            raise EngineError("gone")
        await super().update_weights(source, version)

    async def health(self) -> Health:
        return Health(not self.dead, self.version)


class Sender:
    """The trainer's half: publishes an offer, and is met while it sends."""

    def __init__(self) -> None:
        self.meeting = asyncio.Event()
        self.fails = False
        self.sent: list[WeightSource] = []
        self.log: list[str] = []

    async def publish(self, version: int) -> WeightSource:
        self.log.append(f"publish {version}")
        return WeightSource(version, (), (), 0, 0, "nccl", {**OFFER, "port": version})

    async def send(self, source: WeightSource) -> None:
        self.sent.append(source)
        self.meeting.set()
        await asyncio.sleep(0)
        if self.fails:
            raise EngineError("nobody came")
        self.log.append("sent")

    async def release(self, source: Any) -> None:
        self.log.append("release")


class Parts:
    def __init__(self) -> None:
        self.trainer = Sender()
        self.engines = [Receiver(self.trainer.meeting) for _ in range(2)]
        self.fleet = EngineFleet(self.engines)
        self.sync = WeightSync(Config(), self.trainer, self.fleet, transport="nccl")  # type: ignore[arg-type]
        self.lost: list[int] = []

    def lose(self, index: int, why: str) -> None:
        self.lost.append(index)
        self.fleet.out.add(index)


async def test_the_trainer_sends_while_the_engines_load_and_frees_afterwards() -> None:
    parts = Parts()
    for version in (1, 2):
        await parts.sync.publish(version)
    assert parts.trainer.log == ["publish 1", "sent", "release", "publish 2", "sent", "release"]
    for index, engine in enumerate(parts.engines):
        assert [part.fetch["port"] for part in engine.told] == [1, 1], "the group of the first update serves the second"
        assert [part.fetch["rank_offset"] for part in engine.told] == [1 + index] * 2
        assert [call[0] for call in engine.calls] == ["pause", "update_weights", "resume"] * 2
    assert [source.fetch["world_size"] for source in parts.trainer.sent] == [3, 3]


async def test_an_engine_that_died_leaves_the_group_and_its_successor_gets_one() -> None:
    parts = Parts()
    parts.fleet.lost = parts.lose
    parts.engines[1].dies = parts.trainer.fails = True
    await parts.sync.publish(1)
    assert parts.lost == [1] and parts.engines[0].version == 1
    parts.trainer.fails = False
    await parts.sync.publish(2)
    assert parts.trainer.sent[-1].fetch == {**OFFER, "port": 2, "rank_offset": 1, "world_size": 2}
    new = Receiver(parts.trainer.meeting)
    await parts.sync.give(1, new)
    assert new.version == 2 and parts.fleet.engines[1] is new and not parts.fleet.out
    assert parts.trainer.sent[-1].fetch["world_size"] == 2 and len(parts.engines[0].told) == 2
    await parts.sync.publish(3)
    assert parts.trainer.sent[-1].fetch == {**OFFER, "port": 3, "rank_offset": 1, "world_size": 3}
    assert new.version == parts.engines[0].version == 3


async def test_a_refusal_or_a_trainer_that_cannot_send_is_a_failure() -> None:
    for refuses, fails, said in (
        (True, False, "no such name"),
        (False, True, "nobody came"),
        (True, True, "no such name"),
    ):
        parts = Parts()
        parts.engines[0].refuses, parts.trainer.fails = refuses, fails
        with pytest.raises(EngineError, match=said):
            await parts.sync.publish(1)
        assert parts.trainer.log[-1] == "release" and parts.sync.version == 0
        assert all(engine.calls[-1] == ("resume",) for engine in parts.engines)


WEIGHTS = {"b": torch.ones(3, dtype=torch.bfloat16), "a": torch.zeros(2, 2), "c": torch.ones(1, dtype=torch.float16)}


def test_what_is_broadcast_lies_aligned_and_waits_at_a_port_that_is_held() -> None:
    publisher = NcclPublisher(5.0, host="127.0.0.1")
    source = publisher.publish(WEIGHTS.items(), 3)
    assert [(spec.name, spec.offset, spec.dtype) for spec in source.tensors] == [
        ("a", 0, "float32"), ("b", 16, "bfloat16"), ("c", 22, "float16"),
    ]  # fmt: skip
    assert source.nbytes == 24 and source.transport == "nccl"
    assert WeightSource.from_dict(source.to_dict()) == source
    with pytest.raises(OSError), socket.create_server((source.fetch["address"], source.fetch["port"])):
        pass
    again = publisher.publish(WEIGHTS.items(), 4)
    assert again.fetch == source.fetch, "nobody met there yet"
    for name, wrong, said in (("b", torch.empty(0), "size 0"), ("a", torch.ones(1), "twice")):
        with pytest.raises(EngineError, match=said):
            publisher.publish([("a", torch.ones(1)), (name, wrong)], 5)
    publisher.close()
    with socket.create_server((source.fetch["address"], source.fetch["port"])):
        pass


def test_a_group_that_does_not_come_about_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, one that fails; afterwards the publisher offers another place to meet."""
    publisher = NcclPublisher(0.2, host="127.0.0.1")
    source = publisher.publish(WEIGHTS.items(), 3).with_fetch(world_size=2, rank_offset=1)
    hung = []

    def hang(*where: Any) -> Any:
        hung.append(where)
        where[-1].accept()

    monkeypatch.setattr(publisher, "_broadcast", lambda source: publisher._joined(source.fetch))
    monkeypatch.setattr(gpu_weights, "open_group", hang)
    with pytest.raises(EngineError, match=r"weight version 3: it took longer than 0.2 s"):
        publisher.send(source)
    with pytest.raises(EngineError, match=r"nobody waits at 127.0.0.1:\d+ any more"):
        publisher.send(source)
    assert publisher.publish(WEIGHTS.items(), 4).fetch["port"] != source.fetch["port"] and len(hung) == 1
    hung[0][-1].close()
    publisher.close()


def test_copies_within_a_gpu_stay_until_they_are_released() -> None:
    exported: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[Any, ...]:
        exported.append(tensor)
        return (tensor.data_ptr(),)

    publisher = IpcPublisher(export, lambda: (torch.device("cpu"), "GPU-1"))
    weight = torch.arange(6.0).view(2, 3).t()
    source = publisher.publish([("w", weight)], 7)
    weight.zero_()
    assert exported[0].is_contiguous() and exported[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]
    handles = pickle.loads(base64.b64decode(source.fetch["handles"]))
    assert handles == [{"GPU-1": (exported[0].data_ptr(),)}]
    assert source.transport == "ipc" and source.tensors[0].shape == (3, 2)
    publisher.release()
    assert not publisher._copies


def test_a_trainer_has_the_publisher_of_its_transport() -> None:
    kinds = {name: type(make_publisher(name, 1.0)) for name in ("auto", "shm", "nccl", "ipc")}
    assert kinds == {"auto": WeightPublisher, "shm": WeightPublisher, "nccl": NcclPublisher, "ipc": IpcPublisher}
