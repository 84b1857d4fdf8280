"""What a run wants of the cluster: counted, compared with what there is, and reserved as one before anything starts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .config import Config, ParallelSection, WatchdogSection
from .errors import ConfigError, InfrastructureError

HALF = 0.5
"""What Ray is told of a GPU that an engine and a trainer rank use in turn."""
SAY_AFTER_S = 3.0
"""How long it is waited in silence."""
FREE_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """What Ray is asked for one process."""

    cpus: float
    gpus: float

    def __add__(self, other: Share) -> Share:
        return Share(self.cpus + other.cpus, self.gpus + other.gpus)

    def times(self, count: int) -> Share:
        return Share(self.cpus * count, self.gpus * count)

    def resources(self) -> dict[str, float]:
        """In Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    def __str__(self) -> str:
        named = ((self.cpus, "CPU"), (self.gpus, "GPU"))
        return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for amount, name in named if amount)


@dataclass(frozen=True)
class Wanted:
    """The processes that take CPUs or GPUs. `shared` = the one engine and the one rank have one place between them;
    `one_node` = the weights go through the memory of one machine, so all are on one.
    """

    engine: Share = Share(0, 0)
    engines: int = 0
    rank: Share = Share(0, 0)
    ranks: int = 0
    shared: bool = False
    one_node: bool = False

    @property
    def of_engines(self) -> Share:
        return self.engine.times(self.engines)

    @property
    def of_ranks(self) -> Share:
        return self.rank.times(self.ranks)

    @property
    def total(self) -> Share:
        return self.of_engines + self.of_ranks

    def bundles(self) -> list[Share]:
        """Places of one node each: of the engines, then of the ranks."""
        if self.shared:
            return [self.engine + self.rank]
        return [self.engine] * self.engines + [self.rank] * self.ranks

    @property
    def strategy(self) -> str:
        """Ray's name of how places are spread: over few nodes, where one is not a must."""
        return "STRICT_PACK" if self.one_node else "PACK"


def wanted_by_run(config: Config, gpus: float, *, trains: bool = True) -> Wanted:
    """On a cluster with so many GPUs; what only plays has no trainer. Raises ConfigError for engine.args that are no sizes."""
    from .engines.transport import transport_of, workers_of_engine

    engine, colocated = config.engine, config.engine.colocated
    default = float(gpus > 0) * (HALF if colocated else 1.0)
    on_devices = default * workers_of_engine(config) if engine.gpus == "auto" else float(engine.gpus)
    count = 0 if config.run.replay is not None or engine.name == "scripted" else engine.count
    ranks = config.parallel.ranks if trains else 0
    return Wanted(
        Share(1.0, on_devices),
        count,
        rank_share(config.parallel, gpus, colocated=colocated),
        ranks,
        shared=colocated and count == ranks == 1,
        one_node=trains and count > 0 and transport_of(config, gpus) == "shm",
    )


def wanted_by_trainer(parallel: ParallelSection, gpus: float) -> Wanted:
    """Of sft, rm and dpo."""
    return Wanted(rank=rank_share(parallel, gpus), ranks=parallel.ranks)


def rank_share(parallel: ParallelSection, gpus: float, *, colocated: bool = False) -> Share:
    """Of one trainer rank; colocated with an engine it is half a GPU."""
    default = (HALF if colocated else 1.0) * (gpus > 0)
    return Share(float(parallel.threads), default if parallel.gpus == "auto" else parallel.gpus)


def cluster_gpus() -> float:
    """GPUs of the cluster, free or not."""
    import ray

    return float(ray.cluster_resources().get("GPU", 0.0))


def check_room(wanted: Wanted) -> None:
    """Raises ConfigError for what this cluster could not hold if nobody else used it."""
    import ray

    total = ray.cluster_resources()
    for name, asked in (("GPU", "gpus"), ("CPU", "cpus")):
        sums = [getattr(share, asked) for share in (wanted.total, wanted.of_engines, wanted.of_ranks)]
        if sums[0] > total.get(name, 0.0):
            raise ConfigError(
                f"The run wants {sums[0]:g} {name}s ({sums[1]:g} for engines, {sums[2]:g} for the trainer); the cluster has "
                f"{total.get(name, 0.0):g}{_free(name)}. Lower {_flags(wanted, name)}."
            )
    _check_nodes(wanted)


def _check_nodes(wanted: Wanted) -> None:
    """No place is larger than every node."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if wanted.one_node and not _fits(wanted.total, nodes):
        raise ConfigError(
            f"With --engine.transport shm engines and trainer share the memory of one node. They want {wanted.total}; the nodes "
            f"have {_listed(nodes)}. On several nodes weights go from GPU to GPU: --engine.transport nccl."
        )
    for what, share in (("An engine", wanted.engine), ("A trainer rank", wanted.rank)):
        if share in wanted.bundles() and not _fits(share, nodes):
            raise ConfigError(f"{what} wants {share} on one node; the nodes have {_listed(nodes)}.")


def _fits(share: Share, nodes: list[dict[str, float]]) -> bool:
    return any(all(node.get(name, 0) >= amount for name, amount in share.resources().items()) for node in nodes)


def _listed(nodes: list[dict[str, float]]) -> str:
    return "; ".join(str(Share(node.get("CPU", 0), node.get("GPU", 0))) for node in nodes) or "nothing"


def _free(name: str) -> str:
    import ray

    return f", {ray.available_resources().get(name, 0.0):g} of them free"


def _flags(wanted: Wanted, name: str) -> str:
    """What lowers the want."""
    engines = ["--engine.count", *(["--engine.gpus"] if name == "GPU" else [])] if wanted.engines else []
    ranks = ["--parallel.ranks", "--parallel.gpus" if name == "GPU" else "--parallel.threads"] if wanted.ranks else []
    *first, last = engines + ranks
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class Reservation:
    """The GPUs of the cluster, and the places that a run holds on it; without a `group` Ray starts processes where it likes."""

    gpus: float = 0.0
    group: Any = None
    wanted: Wanted = Wanted()

    def engine(self, index: int) -> dict[str, Any]:
        """Options of an engine's actor. One that has died leaves its place to the one that replaces it."""
        return self._place(index) if index < self.wanted.engines else {}

    def rank(self, index: int) -> dict[str, Any]:
        """Options of a trainer rank's actor."""
        return self._place(0 if self.wanted.shared else self.wanted.engines + index)

    def _place(self, bundle: int) -> dict[str, Any]:
        if self.group is None:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)}


@contextmanager
def reserved(wanted: Wanted, gpus: float, watch: WatchdogSection) -> Iterator[Reservation]:
    """Everything that is wanted, as one placement group, for as long as the run lasts; Ray frees it as well when this process
    dies.

    What other jobs hold is waited for. Raises InfrastructureError after `watchdog.reserve_timeout_s`.
    """
    from ray.util.placement_group import placement_group

    bundles = [share.resources() for share in wanted.bundles()]
    if not bundles:
        yield Reservation(gpus)
        return
    group = placement_group(bundles, strategy=wanted.strategy)
    try:
        _wait(group, wanted, watch.reserve_timeout_s)
        yield Reservation(gpus, group, wanted)
    finally:
        _give_back(group)


def _give_back(group: Any) -> None:
    """Give it FREE_S: where the server of the cluster is gone, as after a SIGTERM to all processes of a run, Ray waits for it for
    a minute and then aborts the process that waits.
    """
    from ray.util.placement_group import remove_placement_group

    freeing = threading.Thread(target=remove_placement_group, args=(group,), name="give back", daemon=True)
    freeing.start()
    freeing.join(FREE_S)


def _wait(group: Any, wanted: Wanted, timeout_s: float) -> None:
    began, said = time.monotonic(), False
    while not group.wait(min(1.0, timeout_s)):
        waited = time.monotonic() - began
        if waited >= timeout_s:
            raise InfrastructureError(
                f"waited {timeout_s:g} s (--watchdog.reserve-timeout-s) for {_state(wanted)}. Other jobs hold the rest."
            )
        if waited >= SAY_AFTER_S and not said:
            said = True
            log.warning("waiting for %s; other jobs hold the rest. At most %g s", _state(wanted), timeout_s)


def _state(wanted: Wanted) -> str:
    """What is wanted, by whom, and what of it there is."""
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    have = ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}s" for name in ("CPU", "GPU") if total.get(name))
    roles = (("engines", wanted.engines, wanted.of_engines), ("the trainer", wanted.ranks, wanted.of_ranks))
    parts = " and ".join(f"{share} for {who}" for who, count, share in roles if count)
    return f"{parts}; free are {have}"
