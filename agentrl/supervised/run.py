"""One supervised run from checked examples to its exit: start the trainer, run the loop, end every process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import Checkpoints, RunState, read_state
from ..config import DpoConfig, SupervisedConfig
from ..errors import DataError, InfrastructureError, RunStoppedError
from ..loop import Reporter
from ..report.run_folder import RunFolder
from ..rollout.watchdog import within
from .examples import Examples
from .loop import SupervisedLoop, Trainer
from .plan import SupervisedPlan
from .references import give_references, reference_of

StartTrainer = Callable[[SupervisedConfig, str, str, int, float], Awaitable[Trainer]]


@dataclass(frozen=True)
class SupervisedParts:
    """What a run is made of before its processes start. `start_trainer` comes from the trainers' wing."""

    config: SupervisedConfig
    model_path: str
    examples: Examples
    held_out: Examples | None
    plan: SupervisedPlan
    folder: RunFolder
    start_trainer: StartTrainer
    resume_from: Path | None = None


async def supervised_run(parts: SupervisedParts, reporter: Reporter) -> None:
    """Run to the end. Cancelled (Ctrl-C, SIGTERM), it finishes the update under way, saves a checkpoint and ends its processes;
    so it does on a row that cannot be read. What breaks underneath comes out as RunStoppedError with the last whole step and
    the way to go on.
    """
    config, plan, watch = parts.config, parts.plan, parts.config.watchdog
    starting = parts.start_trainer(config, parts.model_path, str(parts.folder.images), plan.steps, plan.lr)
    trainer = await within(starting, "the trainer to start", warn_after=watch.warn_after, fail_after=watch.fail_after)
    try:
        await _train(parts, trainer, reporter)
    finally:
        await trainer.close()


async def _train(parts: SupervisedParts, trainer: Trainer, reporter: Reporter) -> None:
    if isinstance(parts.config, DpoConfig):
        whose = reference_of(parts.config, parts.model_path)
        for name, examples in (("train", parts.examples), ("test", parts.held_out)):
            if examples is not None:
                await give_references(trainer, examples, parts.folder.path, name, whose, reporter)
    checkpoints = Checkpoints(parts.folder.checkpoints, parts.config.ckpt.keep, parts.config.ckpt.minutes)
    state = RunState() if parts.resume_from is None else read_state(parts.resume_from)
    loop = SupervisedLoop(
        parts.config,
        trainer,
        parts.examples,
        parts.held_out,
        parts.plan,
        checkpoints,
        parts.folder,
        reporter,
        state,
    )
    if parts.resume_from is not None:
        await loop.restore(parts.resume_from)
    try:
        await loop.run()
    except (asyncio.CancelledError, DataError):
        if loop.resumable:
            await loop.save()
        raise
    except InfrastructureError as error:
        raise RunStoppedError(f"the run stopped after step {loop.step}: {error} {checkpoints.way_on()}") from error
