"""The rollout worker: a CPU process on Ray that plays many episodes at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..assemble import make_executor, make_renderer
from ..collector import spare_collector
from ..config import Config
from ..engine import Engine
from ..env_loop import EnvLoops
from ..executor import AgentExecutorBase, RolloutContext, play
from ..image_store import ImageStore
from ..messages import message_record
from ..renderer import Renderer
from .episode import EpisodeOrder, EpisodeResult, result_of


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process needs to begin. `engines` are handles that travel between processes."""

    config: Config
    model_path: str
    image_dir: str
    engines: tuple[Any, ...]


class EpisodePlayer:
    """Plays the episodes it is ordered to. Whatever goes wrong in one comes back as its result's error."""

    def __init__(
        self,
        engines: Sequence[Engine],
        renderer: Renderer,
        executor: AgentExecutorBase,
        images: ImageStore | None = None,
        env: str = "data",
    ) -> None:
        self.engines = list(engines)
        self.renderer = renderer
        self.executor = executor
        self.images = images
        self.env = env
        self._env_loops = EnvLoops()
        self._playing: dict[str, RolloutContext] = {}

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        ctx = RolloutContext(
            engine=self.engines[order.engine],
            renderer=self.renderer,
            sampling=order.sampling,
            limits=order.limits,
            seed=order.seed,
            env_seed=order.env_seed,
            rollout_id=order.rollout_id,
            group_id=order.group_id,
            env=order.task.env or self.env,
            images=self.images,
            training=order.training,
            env_loops=self._env_loops,
        )
        began = time.monotonic()
        self._playing[order.rollout_id] = ctx
        try:
            trajectory = await play(self.executor, order.task, ctx)
        finally:
            self._playing.pop(order.rollout_id, None)
        return result_of(order, trajectory, time.monotonic() - began)

    async def stages(self) -> dict[str, str]:
        """What each episode that is played here waits for, by rollout id."""
        return {rollout_id: ctx.stage for rollout_id, ctx in self._playing.items()}


class RolloutWorker(EpisodePlayer):
    """An `EpisodePlayer` in a process of its own; `index` counts the workers of a run."""

    def __init__(self, spec: WorkerSpec, index: int = 0) -> None:
        logging.basicConfig(level=logging.WARNING)
        super().__init__(
            spec.engines,
            make_renderer(spec.config, spec.model_path),
            make_executor(spec.config, index, patient=True),
            ImageStore(spec.image_dir),
            spec.config.env.label,
        )
        spare_collector()

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        """Pictures stay in the image store: in the messages there are their hashes, and nothing large travels."""
        result = await super().play(order)
        result.messages = [message_record(message) for message in result.messages]
        return result

    async def set_engine(self, index: int, engine: Any) -> None:
        """Another engine in the place of a lost one."""
        self.engines[index] = engine

    async def ready(self) -> bool:
        """Answers once the worker can play."""
        return True
