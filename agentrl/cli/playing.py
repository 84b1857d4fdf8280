"""What `rollout` and `eval` share: their options, and a place where episodes are played."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..assemble import make_executor, make_renderer
from ..config import (
    AlgoSection,
    CkptSection,
    Config,
    LogSection,
    OptimSection,
    ParallelSection,
    RolloutSection,
    TrainSection,
)
from ..engine import Engine
from ..image_store import ImageStore
from ..placement import Reservation, reserved, wanted_by_run
from ..preflight import Ready, look, make_ready
from ..registry import load_object
from ..renderer import Renderer
from ..rollout.player import Player
from ..rollout.worker import EpisodePlayer
from ..tokens import read_token
from .policy import choose_model, tiny_kind, untrained_tiny
from .signals import terminable, until_signal

Hidden = tyro.conf.Suppress

ENGINES = ("vllm", "scripted", "random", "openai")


class PlayedSection(RolloutSection):
    """How episodes are played."""

    n_samples: Annotated[int, Hidden] = 8
    partial: Annotated[bool | None, Hidden] = None
    kv: Annotated[Literal["keep", "recompute"], Hidden] = "keep"
    order: Annotated[Literal["in_order", "first_done"], Hidden] = "in_order"
    oversample: Annotated[float, Hidden] = 1.0
    retire_after: Annotated[int, Hidden] = 0
    mask_stale_tokens: Annotated[bool, Hidden] = False
    max_error_rate: Annotated[float, Hidden] = 0.5


class PlayCommand(Config):
    """The options of a run, so that a run's file can be given; flags that only training uses are not taken."""

    config: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """TOML or YAML file with options, a run's config.toml for instance; flags win over it."""
    debug: bool = False
    """Show stack traces."""
    rollout: PlayedSection = PlayedSection()
    algo: Annotated[AlgoSection, Hidden] = AlgoSection()
    optim: Annotated[OptimSection, Hidden] = OptimSection()
    train: Annotated[TrainSection, Hidden] = TrainSection()
    parallel: Annotated[ParallelSection, Hidden] = ParallelSection()
    ckpt: Annotated[CkptSection, Hidden] = CkptSection()
    log: Annotated[LogSection, Hidden] = LogSection()

    def settings(self, **sections: Any) -> Config:
        """The configuration without a trainer: no rank takes a GPU. `sections` replace whole sections."""
        plain = {name: section.model_dump() for name in Config.model_fields if (section := getattr(self, name))}
        return Config.model_validate({**plain, "parallel": {"gpus": 0.0}, **sections})


def log_quietly(debug: bool) -> None:
    """Episodes that fail are summed up at the end, without a line each; rows that are left out are named at once."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(levelname)s %(message)s")
    logging.getLogger("agentrl.data").setLevel(logging.DEBUG if debug else logging.WARNING)


def ready_to_play(config: Config, session: ExitStack) -> tuple[Ready, Reservation]:
    """(what is known before anything loads, the places of the engines). Joins Ray, for as long as `session` lasts, only for an
    engine that needs it, and after the environment has shown that it works.
    """
    looked = look(config)
    uses_images = looked.facts.images > 0
    if in_process(config):
        named = config.model.path is not None
        path = (
            choose_model(config, uses_images, 0.0, weights=False) if named else untrained_tiny(tiny_kind(uses_images))
        )
        return make_ready(looked, path), Reservation()
    reservation = join_cluster(config, session)
    return make_ready(looked, choose_model(config, uses_images, reservation.gpus)), reservation


def join_cluster(config: Config, session: ExitStack) -> Reservation:
    """The places of the engines, held for as long as `session` lasts."""
    from ..cluster import check_gpus, connected, cpus_of_run

    session.enter_context(connected(cpus_of_run(config)))
    session.enter_context(terminable())
    gpus = check_gpus(config, trains=False)
    return session.enter_context(reserved(wanted_by_run(config, gpus, trains=False), gpus, config.watchdog))


@asynccontextmanager
async def open_player(ready: Ready, image_dir: Path, reservation: Reservation) -> AsyncIterator[Player]:
    """Where episodes are played: in this process for an engine without a model, else in workers on Ray."""
    config = ready.config
    if in_process(config):
        renderer = make_renderer(config, ready.model_path)
        engines = [engine_here(config, renderer)] * config.engine.count
        name = config.env.label
        yield EpisodePlayer(engines, renderer, make_executor(config), ImageStore(image_dir), name)
        return
    from ..cluster import Cluster

    async with Cluster(ready, image_dir, reservation) as cluster:
        assert cluster.pool is not None
        yield cluster.pool


def in_process(config: Config) -> bool:
    """Whether the engine is none that Ray has to run."""
    return config.engine.name in ("scripted", "random") or config.engine.name.startswith("openai:")


def engine_here(config: Config, renderer: Renderer) -> Engine:
    """An engine without a model of ours."""
    engine = config.engine
    if engine.name.startswith("openai:"):
        from ..engines.openai import PREFIX, OpenAIEngine

        token = read_token(engine.token_file, "--engine.token-file")
        return OpenAIEngine(engine.name.removeprefix(PREFIX), renderer, model=engine.model, token=token)
    from ..engines.random import RandomEngine, ordinary_ids
    from ..engines.scripted import ScriptedEngine

    if config.engine.name == "scripted":
        return ScriptedEngine(load_object(config.engine.script or ""))
    return RandomEngine(ordinary_ids(renderer), renderer.stop_ids, seed=config.run.seed)


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run the work. Raises KeyboardInterrupt when SIGINT or SIGTERM ended it, after it has cleaned up."""
    if asyncio.run(until_signal(work)):
        raise KeyboardInterrupt
