"""One training run from a checked configuration to its exit: start the parts, run the loop, end every process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Checkpoints, RunState, read_state
from .cluster import Cluster
from .config import Config
from .config.plan import Plan
from .engines.fleet import EngineFleet
from .evaluation import Evaluator
from .loop import Loop, Reporter
from .preflight import Ready
from .report.run_folder import RunFolder
from .rollout.dispatcher import Dispatcher
from .rollout.task_source import TaskSource
from .rollout.watchdog import within
from .training import Trainer

log = logging.getLogger(__name__)
StartTrainer = Callable[[Config, str, str, int, float], Awaitable[Trainer]]


@dataclass(frozen=True)
class RunParts:
    """What a run is made of before its processes start. `start_trainer` comes from the trainers' wing."""

    ready: Ready
    plan: Plan
    folder: RunFolder
    filter_groups: bool
    gpus: float
    start_trainer: StartTrainer
    resume_from: Path | None = None

    @property
    def config(self) -> Config:
        return self.ready.config


async def train_run(parts: RunParts, reporter: Reporter) -> None:
    """Run to the end. Cancelled (Ctrl-C, SIGTERM), it stops dispatching, saves a checkpoint and ends its processes."""
    async with AsyncExitStack() as stack:
        cluster = Cluster(parts.ready, parts.folder.images, parts.gpus)
        trainer_starts = asyncio.ensure_future(_start_trainer(parts))
        stack.push_async_callback(_close_trainer, trainer_starts)
        await asyncio.gather(stack.enter_async_context(cluster), trainer_starts)
        loop = _make_loop(parts, cluster, trainer_starts.result(), reporter)
        if parts.resume_from is not None:
            await loop.restore(parts.resume_from)
        try:
            await loop.run()
        except asyncio.CancelledError:
            await _leave(loop)
            raise
        except BaseException:
            await loop.dispatcher.stop()
            loop.record_unfinished()
            raise


async def _start_trainer(parts: RunParts) -> Trainer:
    config, watch = _with_own_limits(parts.ready), parts.config.watchdog
    starting = parts.start_trainer(
        config, parts.ready.model_path, str(parts.folder.images), parts.plan.updates, parts.plan.lr
    )
    return await within(starting, "the trainer to start", warn_after=watch.warn_after, fail_after=watch.fail_after)


def _with_own_limits(ready: Ready) -> Config:
    """The configuration with the turns an episode really has at most: the trainer counts in longest episodes."""
    rollout = ready.config.rollout.model_copy(update={"max_turns": ready.limits.max_turns})
    return ready.config.model_copy(update={"rollout": rollout})


async def _close_trainer(starts: asyncio.Future[Trainer]) -> None:
    starts.cancel()
    try:
        await (await starts).close()
    except (asyncio.CancelledError, Exception) as error:
        log.debug("the trainer had not started: %r", error)


async def _leave(loop: Loop) -> None:
    """The run was interrupted: what is trained is saved, what was in flight is recorded."""
    await loop.dispatcher.stop()
    if loop.resumable:
        await loop.save()
    loop.record_unfinished()


def _make_loop(parts: RunParts, cluster: Cluster, trainer: Trainer, reporter: Reporter) -> Loop:
    config, ready = parts.config, parts.ready
    assert cluster.pool is not None
    state = RunState() if parts.resume_from is None else read_state(parts.resume_from)
    source = TaskSource(ready.tasks, seed=config.run.seed, shuffle=config.rollout.sampler == "shuffled")
    steps = parts.plan.steps if config.train.steps is not None else None
    dispatcher = Dispatcher(
        config,
        cluster.pool,
        source,
        ready.limits,
        draws=ready.total if steps is None else None,
        wanted=None if steps is None else (steps - state.step) * config.train.batch_groups,
        filter_groups=parts.filter_groups,
        version=state.version,
        next_draw=state.next_draw,
        reissue=state.outstanding,
    )
    return Loop(
        config,
        dispatcher,
        trainer,
        EngineFleet(cluster.engines),
        Evaluator(config, cluster.pool, ready.held_out, ready.limits) if ready.held_out else None,
        Checkpoints(parts.folder.checkpoints, config.ckpt.keep),
        parts.folder,
        reporter,
        steps,
        state.step,
        state.version,
    )
