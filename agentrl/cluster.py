"""The processes of a run on Ray: engines and rollout workers, started together, ended together."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from .config import Config, ParallelSection
from .errors import ConfigError, InfrastructureError
from .guardian import end_now, guarded
from .placement import Reservation, check_room, cluster_gpus, wanted_by_run, wanted_by_trainer
from .preflight import Ready
from .rollout.pool import WorkerPool
from .rollout.worker import WorkerSpec

log = logging.getLogger(__name__)
STARTS = 3

if TYPE_CHECKING:
    from .engines.vllm_actor import RayEngine


@contextmanager
def connected(cpus: int) -> Iterator[None]:
    """Ray for the time of a run: the connection there is, the cluster that RAY_ADDRESS names, or one on this machine with
    at least so many CPUs. Only the last is ended afterwards, also when this process is killed.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    local = os.environ.get("RAY_ADDRESS", "") in ("", "local")
    folder = _connect(cpus, local)
    with guarded(folder) if local else nullcontext():
        try:
            yield
        finally:
            ray.shutdown()


def _connect(cpus: int, local: bool) -> str:
    """The folder of the cluster's session. Raises InfrastructureError: Ray has no class for what kept it from starting."""
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True, "logging_level": logging.ERROR}
    if local:
        # Ray's default niceness of 15 lets any other program on the machine starve engines and trainer, but not the driver.
        # Its server would keep a record of each of the last 100,000 calls, 3 KB each, for a dashboard that is off.
        options |= {
            "address": "local",
            "num_cpus": max(cpus, os.cpu_count() or 1),
            "_system_config": {"worker_niceness": 0, "task_events_report_interval_ms": 0},
        }
    _start(options, STARTS if local else 1)
    folder: str = ray._private.worker._global_node.get_session_dir_path()
    return folder


def _start(options: dict[str, Any], tries: int) -> None:
    """Ray gives itself 30 s to start, which a busy machine may not give it. What it had started by then it leaves running."""
    import ray

    for left in reversed(range(tries)):
        before = psutil.Process().children(recursive=True)
        try:
            ray.init(**options)
        except Exception as error:
            said = f"Ray did not start: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            ray.shutdown()
            end_now(process for process in psutil.Process().children(recursive=True) if process not in before)
            if not left:
                raise InfrastructureError(said) from error
            log.warning("%s It is tried again.", said)
        else:
            return


def cpus_of_run(config: Config) -> int:
    """CPUs that the actors of a run ask for, and one to spare."""
    return config.engine.count + trainer_cpus(config.parallel) + 1


def trainer_cpus(parallel: ParallelSection) -> int:
    """CPUs that the trainer's ranks ask for."""
    return parallel.ranks * parallel.threads


def check_trainer_gpus(parallel: ParallelSection) -> float:
    """GPUs of the cluster. Raises ConfigError when the ranks want more than there is."""
    gpus = cluster_gpus()
    check_room(wanted_by_trainer(parallel, gpus))
    return gpus


def check_gpus(config: Config, *, trains: bool = True) -> float:
    """GPUs of the cluster. Raises ConfigError when the run wants more than there is, or what does not go together."""
    from .engines.transport import check_transport, workers_of_engine

    gpus = cluster_gpus()
    if config.engine.colocated:
        _check_colocated(config, gpus, workers_of_engine(config))
    check_room(wanted_by_run(config, gpus, trains=trains))
    if trains:
        check_transport(config, gpus)
    return gpus


def _check_colocated(config: Config, gpus: float, spread: int) -> None:
    """One engine and one rank take turns on one GPU. The scripted engine plays it without any."""
    if config.engine.name == "vllm" and not gpus:
        raise ConfigError("--engine.colocated: there is no GPU that engine and trainer could share.")
    if gpus and (config.engine.count > 1 or config.parallel.ranks > 1 or spread > 1):
        raise ConfigError("--engine.colocated is for one engine and one trainer rank on one GPU.")


class Cluster:
    """Engines and workers of one run, as an async context manager. Leaving it ends every process it started."""

    def __init__(self, ready: Ready, image_dir: Path | str, reservation: Reservation) -> None:
        self.ready = ready
        self.config = ready.config
        self.image_dir = str(image_dir)
        self.reservation = reservation
        self.engines: list[RayEngine] = []
        self.pool: WorkerPool | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Cluster:
        try:
            self.engines = [self._spawn_engine(index) for index in range(self.config.engine.count)]
            spec = WorkerSpec(self.config, self.ready.model_path, self.image_dir, tuple(self.engines))
            self.pool = WorkerPool(spec, self.config.rollout.workers)
            await asyncio.gather(self.pool.ready(), *(engine.start() for engine in self.engines))
            self._watch = asyncio.create_task(self.pool.watch())
        except BaseException:
            await self.close()
            raise
        return self

    async def respawn(self, index: int) -> RayEngine:
        """End an engine, whatever it is doing, and start another in its place. Raises EngineError."""
        self.engines[index].kill()
        self.engines[index] = self._spawn_engine(index)
        await self.engines[index].start()
        return self.engines[index]

    def _spawn_engine(self, index: int) -> RayEngine:
        engine = self.config.engine
        if engine.name == "scripted":
            from .engines.scripted_actor import spawn_scripted

            return spawn_scripted(engine.script or "")
        from .engines.starting import engine_kind, vllm_options
        from .engines.vllm_actor import spawn_engine

        options = vllm_options(self.ready, self.reservation.gpus)
        share = wanted_by_run(self.config, self.reservation.gpus).engine
        gpus = share.gpus if options.device == "gpu" else 0
        return spawn_engine(
            options, actor_options={"num_gpus": gpus, **self.reservation.engine(index)}, kind=engine_kind(engine.name)
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End workers, then engines."""
        if self._watch is not None:
            self._watch.cancel()
        if self.pool is not None:
            self.pool.close()
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
