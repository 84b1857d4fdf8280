"""The training loop: take a batch, train on it, publish the weights. Synchronous and asynchronous runs are this same code;
`train.max_staleness` alone decides how far generation may run ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .checkpoint import Checkpoints, RunState
from .config import Config
from .engines.fleet import EngineFleet
from .evaluation import Evaluator
from .report.clock import StepClock
from .report.metrics import Metrics, episode_metrics, group_metrics, staleness_metrics
from .report.record import batch_records, group_records
from .report.run_folder import RunFolder
from .rollout.dispatcher import Batch, Dispatcher, RunStoppedError
from .rollout.group import Group
from .rollout.watchdog import within
from .training import Trainer, TrainReport

T = TypeVar("T")
INTERRUPT_GRACE_S = 8.0


class Reporter(Protocol):
    """Shows progress to a person."""

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


@dataclass
class Loop:
    """The parts of one run and where it stands. `steps` = batches to train in all; None = until the data is used up."""

    config: Config
    dispatcher: Dispatcher
    trainer: Trainer
    fleet: EngineFleet
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    folder: RunFolder
    reporter: Reporter
    steps: int | None
    step: int = 0
    version: int = 0
    clock: StepClock = field(default_factory=StepClock)
    _current: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Train to the end, then evaluate, save and export. Raises RunStoppedError when the run cannot go on."""
        if self.step == 0:
            await self._evaluate_first()
        self.dispatcher.start()
        while self.steps is None or self.step < self.steps:
            self.clock.start()
            batch = await self.dispatcher.next_batch()
            self.clock.lap("rollout_wait")
            if batch is None or not batch.groups:
                self._out_of_data(batch)
                break
            await self._uninterrupted(self._train(batch))
            if self._due(self.config.eval.every):
                await self._evaluate_here()
            if self._due(self.config.ckpt.every):
                await self.save()
        await self._finish()

    async def _train(self, batch: Batch) -> None:
        """One step: update on the batch, new weights on every engine, places free again, records written."""
        self.step += 1
        rows = [row for group in batch.groups for row in group.rows]
        report = await self._watched(self.trainer.train(rows, self.step), f"the trainer, in step {self.step}")
        self.clock.lap("train")
        trained_at = self.version
        if report.updated:
            await self._publish(self.version + 1)
        self.clock.lap("weights")
        self.dispatcher.settle(self.version)
        self._record(self.step, batch_records(batch, report, self.step))
        self._write(self._step_record(batch, report, trained_at))

    async def _uninterrupted(self, step: Coroutine[Any, Any, None]) -> None:
        """A step once begun is finished, unless it takes longer than INTERRUPT_GRACE_S after an interrupt."""
        self._current = asyncio.ensure_future(step)
        try:
            await asyncio.shield(self._current)
        except asyncio.CancelledError:
            await asyncio.wait([self._current], timeout=INTERRUPT_GRACE_S)
            self._current.cancel()
            raise

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of this moment would be consistent: something was trained, and no step is half done."""
        return self.step > 0 and not self._half_done

    @property
    def _half_done(self) -> bool:
        """A step began and has not come to a good end."""
        step = self._current
        return step is not None and (not step.done() or step.cancelled() or step.exception() is not None)

    async def _publish(self, version: int) -> None:
        """The trainer's weights on every engine under a new version; running episodes go on with them."""
        source = await self._watched(self.trainer.publish(version), f"the trainer to publish version {version}")
        try:
            if not partial_rollouts(self.config):
                await self.dispatcher.drain()
            await self.fleet.publish(source, version)
        finally:
            await self._watched(self.trainer.release(source), "the trainer to free what it published")
        self.version = version

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: the engines serve the restored weights before the first rollout."""
        await self._watched(self.trainer.load(checkpoint), f"the trainer to load {checkpoint}")
        await self._publish(self.version)
        self.dispatcher.settle(self.version)

    async def save(self) -> None:
        """A checkpoint of this moment: weights, optimizer, and which draws are still owed."""
        state = RunState(self.step, self.version, self.dispatcher.next_draw, tuple(self.dispatcher.outstanding()))
        await self._watched(self.checkpoints.save(state, self.trainer.save), f"the checkpoint of step {self.step}")

    def record_unfinished(self) -> None:
        """Groups that a stopped run leaves behind, in the record of the step they would have been part of."""
        self._record_groups(self.dispatcher.abandon(), self.step if self._half_done else self.step + 1)

    # ------------------------------------------------------------------ evaluation

    async def _evaluate_first(self) -> None:
        """Where the policy starts: the record of step 0."""
        if self.evaluator is not None:
            record = {"step": 0, "version": self.version} | await self._evaluate()
            self.folder.add_metrics(record)
            self.reporter.evaluation(record)

    async def _evaluate(self) -> Metrics:
        assert self.evaluator is not None
        return await self.evaluator.run() | {"eval/version": float(self.version)}

    async def _evaluate_here(self) -> None:
        """Evaluate the weights of the newest step and add the result to its record."""
        if self.evaluator is None:
            return
        found = {"step": self.step, "version": self.version} | await self._evaluate()
        self.folder.amend_metrics(found)
        self.reporter.evaluation(found)

    async def _finish(self) -> None:
        await self.dispatcher.stop()
        self.record_unfinished()
        if not self._due(self.config.eval.every):
            await self._evaluate_here()
        await self.save()
        await self._watched(self.trainer.export(self.folder.final), "the export of the model")

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    async def _watched(self, call: Coroutine[Any, Any, T], what: str) -> T:
        watch = self.config.watchdog
        return await within(call, what, warn_after=watch.warn_after, fail_after=watch.fail_after)

    # ------------------------------------------------------------------ records

    def _record(self, step: int, episodes: Iterable[dict[str, Any]]) -> None:
        if self.config.log.rollouts:
            self.folder.add_rollouts(step, episodes)

    def _record_groups(self, untrained: Sequence[Group], step: int) -> None:
        if untrained:
            self._record(step, group_records(untrained, step))

    def _step_record(self, batch: Batch, report: TrainReport, trained_at: int) -> dict[str, Any]:
        results = [result for group in (*batch.groups, *batch.dropped) for result in group.results]
        trained = [result for group in batch.groups for result in group.results]
        return {
            "step": self.step,
            "version": self.version,
            **episode_metrics(results),
            **group_metrics(batch.groups, batch.dropped),
            **staleness_metrics(batch.groups, trained_at),
            **report.metrics,
            **self.clock.finish(trained),
            "episodes_in_flight": float(self.dispatcher.episodes_in_flight),
        }

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.add_metrics(record)
        self.reporter.step(record)

    def _out_of_data(self, batch: Batch | None) -> None:
        dropped = batch.dropped if batch is not None else []
        self._record_groups(dropped, self.step + 1)
        failures = sum(group.outcome == "failed" for group in dropped)
        if failures and self.step == 0:
            raise RunStoppedError(
                f"no group could be trained: {failures} of {len(dropped)} had no episode with a verdict. "
                f"Their errors are in {self.folder.rollouts(self.step + 1)}."
            )


def partial_rollouts(config: Config) -> bool:
    """Whether episodes go on across weight updates."""
    chosen = config.rollout.partial
    return config.train.max_staleness > 0 if chosen is None else chosen
