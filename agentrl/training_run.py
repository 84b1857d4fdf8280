"""One training run from a checked configuration to its exit: start the parts, run the loop, end every process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints, RunState, read_state
from .cluster import Cluster
from .config import Config
from .config.plan import Plan, draws_in_all
from .engine import SleepingEngine
from .engines.fleet import EngineFleet
from .engines.keeper import EngineKeeper, KeptPlayer
from .engines.load_watch import LoadWatch
from .engines.transport import Transport, transport_of
from .errors import InfrastructureError, RunStoppedError
from .evaluation import BackgroundEvaluation, Evaluator
from .loop import BatchSource, Loop, Reporter
from .placement import Reservation
from .preflight import Ready
from .replay import RecordedBatches
from .report.read_record import read_held
from .report.run_folder import RunFolder
from .report.status import StatusFile
from .rollout.dispatcher import Dispatcher
from .rollout.ledger import GroupLedger, signal_filter
from .rollout.mixture import make_source
from .rollout.pool import WorkerPool
from .rollout.watchdog import within
from .training import Trainer
from .weight_sync import WeightSync

log = logging.getLogger(__name__)
Describe = Callable[[], Awaitable[dict[str, Any]]]
StartTrainer = Callable[[Config, str, str, int, float], Awaitable[Trainer]]


@dataclass(frozen=True)
class RunParts:
    """What a run is made of before its processes start. `start_trainer` comes from the trainers' wing."""

    ready: Ready
    plan: Plan
    folder: RunFolder
    filter_groups: bool
    reservation: Reservation
    start_trainer: StartTrainer
    resume_from: Path | None = None

    @property
    def config(self) -> Config:
        return self.ready.config

    @property
    def transport(self) -> Transport:
        """How weights get to the engines."""
        return transport_of(self.config, self.reservation.gpus)

    @property
    def fixed_steps(self) -> int | None:
        """Batches to train; None = until the data is used up."""
        return self.plan.steps if self.config.train.steps is not None else None


async def train_run(parts: RunParts, reporter: Reporter) -> None:
    """Run to the end. Cancelled (Ctrl-C, SIGTERM), it stops dispatching, saves a checkpoint and ends its processes.

    What breaks underneath comes out as RunStoppedError with the last whole step and the way to go on.
    """
    reporter.stage(f"starting {_processes(parts.config)}")
    async with AsyncExitStack() as stack:
        status = StatusFile(parts.folder.status, _starting(_state(parts)))
        stack.push_async_callback(_cancelled, asyncio.create_task(status.keep()))
        if parts.config.engine.colocated:
            await _run_colocated(parts, stack, reporter, status)
            return
        trainer_starts = asyncio.ensure_future(_start_trainer(parts))
        stack.push_async_callback(_close_trainer, trainer_starts)
        pool = None
        if parts.config.run.replay is not None:
            loop = _replaying_loop(parts, await trainer_starts, reporter)
        else:
            cluster = Cluster(parts.ready, parts.folder.images, parts.reservation)
            await asyncio.gather(stack.enter_async_context(cluster), trainer_starts)
            loop = _kept_loop(parts, cluster, trainer_starts.result(), reporter, stack)
            pool = cluster.pool
        status.describe = _describing(loop, pool)
        await _run(parts, loop)


def _processes(config: Config) -> str:
    ranks = f"the trainer ({config.parallel.ranks} rank{'s' * (config.parallel.ranks > 1)})"
    if config.run.replay is not None:
        return ranks
    return f"{config.engine.count} engine{'s' * (config.engine.count > 1)}, the rollout workers and {ranks}"


async def _run_colocated(parts: RunParts, stack: AsyncExitStack, reporter: Reporter, status: StatusFile) -> None:
    """As `train_run`, but the engine sleeps before the trainer loads: there is room for one of them."""
    cluster = await stack.enter_async_context(Cluster(parts.ready, parts.folder.images, parts.reservation))
    await EngineFleet(cluster.engines).sleep()
    trainer_starts = asyncio.ensure_future(_start_trainer(parts))
    stack.push_async_callback(_close_trainer, trainer_starts)
    loop = _kept_loop(parts, cluster, await trainer_starts, reporter, stack)
    await loop.sync.wake()
    status.describe = _describing(loop, cluster.pool)
    await _run(parts, loop)


def _kept_loop(parts: RunParts, cluster: Cluster, trainer: Trainer, reporter: Reporter, stack: AsyncExitStack) -> Loop:
    """The loop, and those that look after the engines until the stack ends."""
    loop, keeper, watch = _make_loop(parts, cluster, trainer, reporter)
    stack.push_async_callback(keeper.close)
    stack.push_async_callback(_cancelled, asyncio.create_task(watch.keep()))
    return loop


def _starting(state: RunState) -> Describe:
    """What is said of a run whose processes start."""
    began = time.monotonic()

    async def describe() -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {"step": state.step, "version": state.version, "doing": "starting", "seconds": seconds, "groups": []}

    return describe


def _describing(loop: Loop, pool: WorkerPool | None) -> Describe:
    async def describe() -> dict[str, Any]:
        batches = loop.dispatcher
        if pool is not None and isinstance(batches, Dispatcher):
            batches.stages.seen(await pool.stages())
        return loop.status()

    return describe


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _run(parts: RunParts, loop: Loop) -> None:
    if parts.resume_from is not None:
        await loop.restore(parts.resume_from)
    try:
        await loop.run()
    except asyncio.CancelledError:
        await _leave(loop)
        raise
    except InfrastructureError as error:
        await _give_up(loop)
        raise RunStoppedError(_epitaph(loop, error)) from error
    except BaseException:
        await _give_up(loop)
        raise


async def _start_trainer(parts: RunParts) -> Trainer:
    config, watch = _as_the_trainer_gets_it(parts), parts.config.watchdog
    images = parts.folder.images if config.run.replay is None else RecordedBatches(Path(config.run.replay)).images
    starting = parts.start_trainer(config, parts.ready.model_path, str(images), parts.plan.updates, parts.plan.lr)
    return await within(starting, "the trainer to start", warn_after=watch.warn_after, fail_after=watch.fail_after)


def _as_the_trainer_gets_it(parts: RunParts) -> Config:
    """The configuration with the turns an episode really has at most, as the trainer counts in longest episodes, and with the
    transport of weights that this cluster has.
    """
    config = parts.config
    rollout = config.rollout.model_copy(update={"max_turns": parts.ready.limits.max_turns})
    engine = config.engine.model_copy(update={"transport": parts.transport})
    return config.model_copy(update={"rollout": rollout, "engine": engine})


async def _close_trainer(starts: asyncio.Future[Trainer]) -> None:
    starts.cancel()
    try:
        await (await starts).close()
    except (asyncio.CancelledError, Exception) as error:
        log.debug("the trainer had not started: %r", error)


async def _leave(loop: Loop) -> None:
    """The run was interrupted: what is trained is saved, what was in flight is recorded."""
    await loop.stop()
    try:
        if loop.resumable:
            await loop.save()
    finally:
        _record_unfinished(loop)


async def _give_up(loop: Loop) -> None:
    await loop.stop()
    _record_unfinished(loop)


def _record_unfinished(loop: Loop) -> None:
    """Where the disk takes no records any more, that is not what the run ends with."""
    try:
        loop.record_unfinished()
    except InfrastructureError as error:
        log.warning("the groups that were in flight are in no record: %s", error)


def _epitaph(loop: Loop, error: BaseException) -> str:
    """Who died, when, and what is left."""
    return f"the run stopped after step {loop.whole_steps}: {error} {loop.checkpoints.way_on()}"


def _make_loop(
    parts: RunParts, cluster: Cluster, trainer: Trainer, reporter: Reporter
) -> tuple[Loop, EngineKeeper, LoadWatch]:
    config, ready, pool = parts.config, parts.ready, cluster.pool
    assert pool is not None
    state = _state(parts)
    sync = WeightSync(config, trainer, EngineFleet(cluster.engines), state.version, parts.transport)

    async def serve(index: int, engine: SleepingEngine) -> None:
        await sync.give(index, engine)
        pool.adopt(index, engine)

    keeper = EngineKeeper(sync.fleet, cluster.respawn, serve, config.engine.max_restarts)
    player = KeptPlayer(pool, keeper)
    source = make_source(config, ready.tasks)
    source.restore(state.source)
    dispatcher = Dispatcher(config, player, source, ready.limits, _make_ledger(parts, state), keeper.ready)
    seats = dispatcher.seats
    evaluator = (
        Evaluator(config, player, ready.held_out, ready.limits, seats=seats, keeper=keeper) if ready.held_out else None
    )
    watch = LoadWatch(sync.fleet, seats, keeper.lose, config.engine.silence_timeout_s)
    return _loop_of(parts, dispatcher, sync, evaluator, reporter, state), keeper, watch


def _replaying_loop(parts: RunParts, trainer: Trainer, reporter: Reporter) -> Loop:
    state = _state(parts)
    recorded = RecordedBatches(Path(parts.config.run.replay or ""), state.step)
    sync = WeightSync(parts.config, trainer, EngineFleet([]), state.version)
    return _loop_of(parts, recorded, sync, None, reporter, state)


def _state(parts: RunParts) -> RunState:
    return RunState() if parts.resume_from is None else read_state(parts.resume_from)


def _loop_of(
    parts: RunParts,
    batches: BatchSource,
    sync: WeightSync,
    evaluator: Evaluator | None,
    reporter: Reporter,
    state: RunState,
) -> Loop:
    checkpoints = Checkpoints(parts.folder.checkpoints, parts.config.ckpt.keep, parts.config.ckpt.minutes)
    evaluation = BackgroundEvaluation(evaluator)
    return Loop(
        parts.config, batches, sync, evaluation, checkpoints, parts.folder, reporter, parts.fixed_steps, state
    )  # fmt: skip


def _make_ledger(parts: RunParts, state: RunState) -> GroupLedger:
    config, resumed, steps = parts.config, parts.resume_from, parts.fixed_steps
    return GroupLedger(
        config,
        draws=draws_in_all(config, parts.ready.total),
        wanted=None if steps is None else (steps - state.step) * config.train.batch_groups,
        keep=signal_filter(config) if parts.filter_groups else lambda group: True,
        version=state.version,
        held=None if resumed is None else read_held(resumed, state.next_draw, state.reissue),
    )
