"""How weights travel from the trainer to the engines: which transport a run has, and which ones it cannot have."""

from __future__ import annotations

import math
from typing import Literal

from ..config import Config
from ..errors import ConfigError
from .vllm_options import parallel_sizes, parse_engine_args

Transport = Literal["shm", "nccl", "ipc"]


def transport_of(config: Config, gpus: float) -> Transport:
    """`engine.transport` on a cluster with so many GPUs. auto: ipc where engine and trainer share a GPU, nccl where each has GPUs
    of its own, shm everywhere else, and for engines of other packages.
    """
    engine = config.engine
    if engine.transport != "auto":
        return engine.transport
    if engine.name != "vllm" or config.run.replay is not None or _off_gpu(config, gpus):
        return "shm"
    if engine.colocated:
        return "ipc"
    return "shm" if _shares_gpu(config) else "nccl"


def check_transport(config: Config, gpus: float) -> None:
    """Raises ConfigError for a transport that this cluster cannot have; what no cluster can have is refused before."""
    chosen = config.engine.transport
    if chosen not in ("nccl", "ipc"):
        return
    if off := _off_gpu(config, gpus):
        raise ConfigError(
            f"--engine.transport {chosen} moves weights from GPU to GPU: {off}. --engine.transport shm works without one."
        )
    if chosen == "nccl" and (shared := _shares_gpu(config)):
        raise ConfigError(
            f"--engine.transport nccl wants whole GPUs for engines and trainer, as no GPU can be in a group twice: {shared}. "
            "--engine.transport shm works with parts of one."
        )


def workers_of_engine(config: Config) -> int:
    """Worker processes of each engine: tensor x pipeline x data parallel."""
    return math.prod(parallel_sizes(parse_engine_args(config.engine.args)).values())


def _off_gpu(config: Config, gpus: float) -> str:
    """What of the run is on no GPU, in words; empty when nothing is."""
    if not gpus:
        return "there is none"
    if config.engine.gpus == 0:
        return "with --engine.gpus 0 the engines have none"
    return "with --parallel.gpus 0 the trainer has none" if config.parallel.gpus == 0 else ""


def _shares_gpu(config: Config) -> str:
    """Which part of a GPU is asked for, in words; empty where everyone has whole ones."""
    for flag, asked in (("--engine.gpus", config.engine.gpus), ("--parallel.gpus", config.parallel.gpus)):
        if asked != "auto" and asked % 1:
            return f"{flag} {asked:g} is a part of one"
    return ""
