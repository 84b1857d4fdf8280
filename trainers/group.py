"""The trainer as the loop sees it: one Ray actor a rank, all called alike, rank 0 answering."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..config import ParallelSection, TrainerConfig
from ..errors import AgentRLError, InfrastructureError
from ..object_store import sent
from ..placement import Reservation, cluster_gpus, rank_share
from ..supervised.examples import Item
from ..training import TrainReport
from ..trajectory import Row

if TYPE_CHECKING:
    from ..engines.weights import WeightSource

Arguments = tuple[Any, str, str, int, float]
"""Of a trainer's constructor: config, model_path, image_dir, planned_updates, default_lr."""

_CLOSE_TIMEOUT_S = 10.0
_PEERS_TIMEOUT_S = 3.0


class RankProcess:
    """The body of one rank's actor. Torch and DeepSpeed are loaded in `start`, in this process only."""

    def __init__(self) -> None:
        self._store: Any = None
        self._trainer: Any = None

    def where(self) -> str:
        """Host and process, for messages."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the rendezvous store on a port that the system chose and this process holds."""
        import ray
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, trainer: str, rank: int, ranks: int, store: tuple[str, int] | None, arguments: Arguments) -> None:
        """Load the model and join the others. `trainer` = `module:Class` in this package."""
        from ..torchvision_ops import ensure_torchvision_imports

        ensure_torchvision_imports()
        from transformers.utils.logging import disable_progress_bar

        from .backend import Place

        disable_progress_bar()
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        module, _, name = trainer.partition(":")
        kind = getattr(importlib.import_module(f".{module}", __package__), name)
        self._trainer = kind(*arguments, Place(rank, ranks, store))

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the trainer."""
        if self._trainer is None:
            raise RuntimeError("start comes first")
        return getattr(self._trainer, method)(*arguments)

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()


@dataclass(frozen=True)
class _Rank:
    actor: Any
    where: str


class Ranks:
    """A trainer on Ray, of the class `trainer`. Make one with `start`; the caller has checked that the cluster has room.

    Errors of agentrl's own classes come through as they were raised; a rank that dies is an InfrastructureError.
    """

    trainer: ClassVar[str]

    def __init__(self, actors: Sequence[Any]) -> None:
        self._ranks = [_Rank(actor, "not started yet") for actor in actors]

    @classmethod
    async def start(
        cls,
        config: TrainerConfig,
        model_path: str,
        image_dir: str,
        planned_updates: int,
        default_lr: float,
        reservation: Reservation = Reservation(),
    ) -> Self:
        """One actor a rank, each with the model loaded. Ray must be initialised. On failure nothing stays behind.

        planned_updates = the horizon of the learning rate (`planned_updates`); default_lr where `optim.lr` is absent;
        `reservation` = the places of the ranks.
        """
        group = cls(_spawn(config.parallel, reservation, colocated=cls.colocated(config)))
        try:
            await group._start((config, model_path, image_dir, planned_updates, default_lr))
        except BaseException:
            await group.close()
            raise
        return group

    @classmethod
    def colocated(cls, config: Any) -> bool:
        """Whether the ranks share their GPUs with engines."""
        return False

    async def _start(self, arguments: Arguments) -> None:
        where = await self._all([rank.actor.where.remote() for rank in self._ranks])
        self._ranks = [_Rank(rank.actor, at) for rank, at in zip(self._ranks, where, strict=True)]
        ranks = len(self._ranks)
        store = await self._await(0, self._ranks[0].actor.listen.remote()) if ranks > 1 else None
        await self._all(
            [rank.actor.start.remote(self.trainer, i, ranks, store, arguments) for i, rank in enumerate(self._ranks)]
        )

    async def save(self, folder: Path) -> None:
        """Into an existing folder that every rank can write to."""
        await self._call("save", folder)

    async def load(self, folder: Path) -> None:
        """The state that `save` wrote."""
        await self._call("load", folder)

    async def export(self, folder: Path) -> None:
        """A Hugging Face folder."""
        await self._call("export", folder)

    async def offload(self) -> None:
        """Every rank leaves its GPU."""
        await self._call("offload")

    async def onload(self) -> None:
        """Every rank takes its GPU back."""
        await self._call("onload")

    async def close(self) -> None:
        """Ask every rank to leave in order, then end its process, also one that hangs or is dead."""
        import ray

        goodbye = [asyncio.ensure_future(_settled(rank.actor.close.remote())) for rank in self._ranks]
        if goodbye:
            await asyncio.wait(goodbye, timeout=_CLOSE_TIMEOUT_S)
        for task in goodbye:
            task.cancel()
        for rank in self._ranks:
            ray.kill(rank.actor)
        self._ranks = []

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks to one call of their trainers."""
        return await self._all([rank.actor.call.remote(method, *arguments) for rank in self._ranks])

    async def _all(self, calls: Sequence[Any]) -> list[Any]:
        """The first failure ends the wait, as others may wait for the failed rank for ever. A death goes before errors:
        what the others say then is only that they lost a peer.
        """
        tasks = [asyncio.ensure_future(self._await(i, call)) for i, call in enumerate(calls)]
        try:
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if others:
                done |= (await asyncio.wait(others, timeout=_PEERS_TIMEOUT_S))[0]
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, InfrastructureError)), errors[0])
        return [task.result() for task in tasks]

    async def _await(self, rank: int, call: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await call
        except RayActorError as error:
            where = self._ranks[rank].where
            raise InfrastructureError(f"trainer rank {rank} ({where}) died: {' '.join(str(error).split())}") from error
        except RayTaskError as error:
            if isinstance(error.cause, AgentRLError):
                raise error.cause from error
            raise


class TrainerGroup(Ranks):
    """`agentrl.training.Trainer`: the trainer of a policy."""

    trainer: ClassVar[str] = "policy_trainer:PolicyTrainer"

    @classmethod
    def colocated(cls, config: Any) -> bool:
        colocated: bool = config.engine.colocated
        return colocated

    async def train(self, rows: list[Row], step: int) -> TrainReport:
        """See PolicyTrainer.train."""
        report: TrainReport = (await self._call("train", _shared(rows), step))[0]
        return report

    async def publish(self, version: int) -> WeightSource:
        """The weights, offered by rank 0 until `release`."""
        source: WeightSource = (await self._call("publish", version))[0]
        return source

    async def send(self, source: WeightSource) -> None:
        """Rank 0 sends while the engines load."""
        await self._await(0, self._ranks[0].actor.call.remote("send", source))

    async def release(self, source: Any) -> None:
        """Free what `publish` gave."""
        await self._call("release")


class SupervisedGroup(Ranks):
    """`agentrl.supervised.loop.Trainer`: sft, rm and dpo."""

    trainer: ClassVar[str] = "supervised_trainer:SupervisedTrainer"

    async def train(self, items: list[Item], step: int) -> TrainReport:
        """See SupervisedTrainer.train."""
        report: TrainReport = (await self._call("train", _shared(items), step))[0]
        return report

    async def evaluate(self, items: list[Item]) -> dict[str, float]:
        """See SupervisedTrainer.evaluate."""
        found: dict[str, float] = (await self._call("evaluate", _shared(items)))[0]
        return found

    async def reference(self, items: list[Item]) -> list[float]:
        """See SupervisedTrainer.reference."""
        sums: list[float] = (await self._call("reference", _shared(items)))[0]
        return sums


def _shared(values: list[Any]) -> Any:
    """Stored once for all ranks of a host. Raises InfrastructureError when Ray has no room for it."""
    import ray

    return sent(ray.put, f"a batch of {len(values)} rows", values)


def _spawn(parallel: ParallelSection, reservation: Reservation, *, colocated: bool) -> list[Any]:
    import ray

    share = rank_share(parallel, cluster_gpus(), colocated=colocated)
    variables = {"OMP_NUM_THREADS": str(parallel.threads), "LOCAL_RANK": "0", "TOKENIZERS_PARALLELISM": "false"}
    if not share.gpus:
        variables["DS_ACCELERATOR"] = "cpu"
    options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "runtime_env": {"env_vars": variables}}
    actor = ray.remote(RankProcess)
    return [actor.options(**options, **reservation.rank(index)).remote() for index in range(parallel.ranks)]


async def _settled(call: Any) -> None:
    """Wait for a call whose failure changes nothing: its process is ended next."""
    from ray.exceptions import RayError

    try:
        await call
    except RayError:
        return
