"""A run without a model: the real loop, dispatcher, buffer and episodes; the engine is scripted and training is a pause.

What an episode lasts depends on its seeds alone, so the simulator can be given the very lengths that are played.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from async_simulator import P99, Run
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl import Env, GenerationRequest, Limits, MultiTurnExecutor, Renderer, Reply, ScriptedEngine, Task
from agentrl.checkpoint import Checkpoints
from agentrl.config import Config
from agentrl.engines.fleet import EngineFleet
from agentrl.evaluation import BackgroundEvaluation
from agentrl.image_store import ImageStore
from agentrl.loop import Loop
from agentrl.report.run_folder import RunFolder
from agentrl.rollout.dispatcher import Dispatcher
from agentrl.rollout.ledger import GroupLedger
from agentrl.rollout.task_source import TaskSource
from agentrl.rollout.worker import EpisodePlayer
from agentrl.seeds import derive, env_seed, sampling_seed
from agentrl.training import TrainReport
from agentrl.trajectory import Row
from agentrl.weight_sync import WeightSync

TURNS = 2
LIMITS = Limits(max_turns=TURNS, max_new_tokens=4, max_len=4096)


@dataclass(frozen=True)
class Waits:
    """Medians of the log-normal waits for one generation and one step of the environment, in seconds, and their tail: the
    99th percentile over the median.
    """

    generation: float
    env: float
    tail: float

    def draw(self, median: float, seed: int) -> float:
        deviations = np.random.default_rng(seed).standard_normal()
        return median * math.exp(math.log(self.tail) / P99 * deviations)

    def of_generation(self, seed: int) -> float:
        return self.draw(self.generation, seed)

    def of_step(self, seed: int, turn: int) -> float:
        return self.draw(self.env, derive(seed, "step", turn))

    def lengths(self, n: int) -> Callable[[int], Sequence[float]]:
        """What the n episodes of a draw wait in all, for a run with seed 0."""

        def seconds(draw: int) -> Sequence[float]:
            steps = sum(self.of_step(env_seed(0, draw), turn) for turn in range(TURNS))
            seeds = [sampling_seed(0, draw, sample) for sample in range(n)]
            return [steps + sum(self.of_generation(derive(seed, turn)) for turn in range(TURNS)) for seed in seeds]

        return seconds

    def first_turns(self, n: int) -> Callable[[int], Sequence[float]]:
        """How long the first generation of each of a draw's episodes takes: the scripted engine stamps what it gives out."""

        def seconds(draw: int) -> Sequence[float]:
            return [self.of_generation(derive(sampling_seed(0, draw, sample), 0)) for sample in range(n)]

        return seconds


def waiting_env(waits: Waits) -> type[Env]:
    """An environment of TURNS turns whose steps take their time, without taking the CPU."""

    class Waiting(Env):
        async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.seed, self.turn = seed or 0, 0
            return "go", {}

        async def step(self, action: Any) -> Any:
            await asyncio.sleep(waits.of_step(self.seed, self.turn))
            self.turn += 1
            return "go", float(self.turn == TURNS), self.turn == TURNS, False, {}

    return Waiting


class Pausing:
    """A trainer that takes its time and changes nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def train(self, rows: list[Row], step: int) -> TrainReport:
        await asyncio.sleep(self.seconds)
        return TrainReport(True, {}, [np.zeros(len(row), np.float32) for row in rows])

    async def publish(self, version: int) -> int:
        return version

    async def send(self, source: Any) -> None: ...

    async def release(self, source: Any) -> None: ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...


class Silent:
    def stage(self, what: str) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": 1, "go": 2, "a": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return tokenizer


def make_loop(
    folder: Path,
    config: Config,
    env: Callable[[], Env],
    script: Callable[[GenerationRequest], Reply],
    train_s: float,
    processor: Any = None,
) -> Loop:
    """A whole run in this process, `config.train.steps` long."""
    engine = ScriptedEngine(script, record=False)
    images = ImageStore(folder / "images")
    player = EpisodePlayer([engine], Renderer(processor or tiny_tokenizer()), MultiTurnExecutor(env, "bench"), images)
    steps = config.train.steps
    assert steps is not None
    ledger = GroupLedger(config, draws=None, wanted=steps * config.train.batch_groups, keep=lambda group: True)
    tasks = TaskSource([Task(str(i)) for i in range(64)], seed=0, shuffle=True)
    return Loop(
        config,
        Dispatcher(config, player, tasks, LIMITS, ledger),
        WeightSync(config, Pausing(train_s), EngineFleet([engine])),
        BackgroundEvaluation(None),
        Checkpoints(folder / "checkpoints", 1),
        RunFolder(folder),
        Silent(),
        steps,
    )


def simulated(config: Config, waits: Waits, train_s: float) -> Run:
    """The same run for the simulator."""
    train, rollout = config.train, config.rollout
    assert train.steps is not None
    return Run(
        waits.lengths(rollout.n_samples),
        train.batch_groups,
        train.steps,
        train.max_staleness,
        train_s,
        partial=rollout.partial is not False,
        drop=train.stale == "drop",
        oversample=rollout.oversample,
        stamped=waits.first_turns(rollout.n_samples),
    )
