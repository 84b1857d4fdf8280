"""The training loop: take a batch, train on it, publish the weights. Synchronous and asynchronous runs are this same code;
`train.max_staleness` alone decides how far generation may run ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .checkpoint import Checkpoints, RunState
from .config import Config
from .errors import RunStoppedError
from .evaluation import BackgroundEvaluation
from .report.clock import StepClock
from .report.metrics import episode_metrics, group_metrics, metrics_by_env, staleness_metrics
from .report.read_record import write_held
from .report.record import batch_records, group_records
from .report.run_folder import RunFolder
from .rollout.group import Batch, Group
from .rollout.ledger import HeldRollouts
from .training import TrainReport
from .trajectory import Row
from .weight_sync import WeightSync
from .whole_step import WholeStep

log = logging.getLogger(__name__)
ALWAYS = {"kl/ref": 0.0, "memory/gpu": 0.0}
"""What every record has, also of a run without a reference model, on a machine without a GPU."""


class BatchSource(Protocol):
    """Where batches come from: a `Dispatcher`, or recorded ones."""

    def start(self) -> None: ...

    async def next_batch(self) -> Batch | None: ...

    def settle(self, version: int) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...

    def held(self) -> HeldRollouts: ...

    def abandon(self) -> list[Group]: ...

    def groups(self) -> list[dict[str, Any]]: ...

    @property
    def episodes_in_flight(self) -> int: ...


class Reporter(Protocol):
    """Shows progress to a person. `stage` says what begins now and will take a while."""

    def stage(self, doing: str) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


@dataclass
class Loop:
    """The parts of one run and where it stands. `steps` = batches to train in all; None = until the data is used up."""

    config: Config
    dispatcher: BatchSource
    sync: WeightSync
    evaluation: BackgroundEvaluation
    checkpoints: Checkpoints
    folder: RunFolder
    reporter: Reporter
    steps: int | None
    state: RunState = field(default_factory=RunState)
    clock: StepClock = field(default_factory=StepClock)
    _whole: WholeStep = field(default_factory=WholeStep)

    def __post_init__(self) -> None:
        self._enter("starting")
        self.step = self.state.step
        self.evaluation.last_step = self.state.evaluated

    async def run(self) -> None:
        """Train to the end, then evaluate, save and export. Raises RunStoppedError when the run cannot go on."""
        if self.step == 0 or self._due(self.config.eval.every):
            self.evaluation.begin(self.step, self.sync.version)
        self.reporter.stage(f"playing the first batch{self._evaluating}")
        self.dispatcher.start()
        while self.steps is None or self.step < self.steps:
            self.clock.start()
            self._enter("waiting for a batch")
            batch = await self.dispatcher.next_batch()
            self.clock.lap("rollout_wait")
            if batch is None:
                self._check_some_were_trained()
                break
            await self._whole.run(self._train(batch))
            if self._due(self.config.eval.every):
                self.evaluation.begin(self.step, self.sync.version)
            if self._due(self.config.ckpt.every) or self.checkpoints.overdue:
                await self.save()
        await self._finish()

    async def _train(self, batch: Batch) -> None:
        """One step: update on the batch, new weights on every engine, places free again, records written.

        The engines keep the old weights until the evaluation of them is over.
        """
        self.step += 1
        self._enter(f"training step {self.step}")
        trained_at = self.sync.version
        rows = batch.rows
        if self.sync.colocated:
            await self._evaluated()
        await self.evaluation.engines_back()
        async with self.sync.training():
            report = await self.sync.watched(
                self.sync.trainer.train(rows, self.step), f"the trainer, in step {self.step}"
            )
            self.clock.lap("train")
            self._enter("waiting for the evaluation")
            await self._evaluated()
            self.clock.lap("evaluation")
            if report.updated:
                await self._publish()
            else:
                log.warning("step %d changed no weights: nothing in its rewards says what was better", self.step)
        self.clock.lap("weights")
        self.dispatcher.settle(self.sync.version)
        self._record(self.step, batch_records(batch, report, self.step, self.config.env.label))
        self._write(self._step_record(batch, rows, report, trained_at))

    async def _publish(self) -> None:
        """The new weights on every engine; where episodes are of a single version, those that run are finished first."""
        self._enter(f"publishing version {self.sync.version + 1}")
        if not partial_rollouts(self.config):
            await self.dispatcher.drain()
        await self.sync.publish(self.sync.version + 1)

    # ------------------------------------------------------------------ where the run stands

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of this moment would be consistent: something was trained, and no step is half done."""
        return self.step > 0 and not self._whole.half_done

    @property
    def whole_steps(self) -> int:
        """Steps that came to a good end."""
        return self.step - self._whole.half_done

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: the engines serve the restored weights before the first rollout."""
        self.state = self.checkpoints.go_on_from(checkpoint)
        async with self.sync.training():
            await self.sync.watched(self.sync.trainer.load(checkpoint), f"the trainer to load {checkpoint}")
            await self.sync.publish(self.sync.version)

    def _enter(self, doing: str) -> None:
        self._doing = (doing, time.monotonic())

    def status(self) -> dict[str, Any]:
        """What the run is doing, as plain values."""
        doing, since = self._doing
        return {
            "step": self.step,
            "version": self.sync.version,
            "doing": doing,
            "seconds": round(time.monotonic() - since, 1),
            "groups": self.dispatcher.groups(),
        }

    async def save(self) -> None:
        """A checkpoint of this moment: weights, optimizer, and the rollouts that are not trained yet. An evaluation of
        these weights is awaited, as it decides whether they are the best. Raises RunStoppedError when it fails.
        """
        self._enter(f"saving the checkpoint of step {self.step}")
        self._note_best(await self._evaluated())
        if self.sync.colocated:
            await self.dispatcher.drain()
        held = self.dispatcher.held()
        self.state = replace(
            self.state,
            step=self.step,
            version=self.sync.version,
            next_draw=held.next_draw,
            reissue=held.reissue,
            evaluated=self.evaluation.last_step,
            source=held.source,
        )

        async def write(folder: Path) -> None:
            write_held(folder, held)
            await self.sync.trainer.save(folder)

        async with self.sync.training():
            saving = self.checkpoints.save(self.state, write)
            await self.sync.watched(saving, f"the checkpoint of step {self.step}")
        if self.sync.colocated:
            self.dispatcher.settle(self.sync.version)

    async def stop(self) -> None:
        """Play nothing any more; what was in flight stays in the books until `save` and `record_unfinished`."""
        await self.dispatcher.stop()
        await self.evaluation.cancel()

    def record_unfinished(self) -> None:
        """Groups that a stopped run leaves behind, in the record of the step they would have been part of."""
        left = self.dispatcher.abandon()
        if left:
            self._record(self.whole_steps + 1, group_records(left, self.whole_steps + 1, self.config.env.label))

    async def _finish(self) -> None:
        """Saved first, recorded last: a run that is gone on with plays what was in flight, as after an interrupt, and one that is
        interrupted in here saves again what was.
        """
        await self.dispatcher.stop()
        self.evaluation.begin(self.step, self.sync.version)
        self.reporter.stage(f"saving the last checkpoint and the model{self._evaluating}")
        await self.save()
        async with self.sync.training():
            exporting = self.sync.watched(self.sync.trainer.export(self.folder.final), "the export of the model")
            await self.checkpoints.then(f"the export of the model to {self.folder.final}", exporting)
        self.record_unfinished()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    # ------------------------------------------------------------------ records

    async def _evaluated(self) -> dict[str, Any]:
        """The result of an evaluation that was begun, added to the record of the step whose weights it played."""
        record = await self.evaluation.over()
        if record is None:
            return {}
        self.folder.amend_metrics(record)
        self.reporter.evaluation(record)
        return record

    @property
    def _evaluating(self) -> str:
        episodes = self.evaluation.episodes
        return f"; evaluating on {episodes} held-out episodes" if episodes else ""

    def _note_best(self, record: dict[str, Any]) -> None:
        wanted = self.config.ckpt.best_by
        if wanted is not None and wanted != "none" and record and wanted not in record:
            known = ", ".join(sorted(key for key in record if key.startswith("eval/")))
            log.warning("--ckpt.best-by %s: the evaluation has no such metric. It has: %s", wanted, known)
        score = record.get("eval/score/mean", record.get("eval/reward/mean")) if wanted is None else record.get(wanted)
        missing = record.get("eval/excluded", 0.0) + record.get("eval/greedy/excluded", 0.0)
        if score is not None and missing:
            log.warning(
                "step %d is not compared with the best: %.0f held-out episodes have no verdict", self.step, missing
            )
            return
        if score is not None and (self.state.best is None or score > self.state.best):
            self.state = replace(self.state, best=score, best_step=self.step)

    def _record(self, step: int, episodes: Iterable[dict[str, Any]]) -> None:
        if self.config.log.rollouts:
            self.folder.add_rollouts(step, episodes)

    def _step_record(self, batch: Batch, rows: Sequence[Row], report: TrainReport, trained_at: int) -> dict[str, Any]:
        results = [result for group in (*batch.groups, *batch.dropped) for result in group.results]
        trained = [result for group in batch.groups for result in group.results]
        return {
            "step": self.step,
            "version": self.sync.version,
            **ALWAYS,
            **episode_metrics(results),
            **metrics_by_env(self.config.env.labels.values(), results, episode_metrics),
            **group_metrics(batch.groups, batch.dropped),
            **staleness_metrics(self._unmasked(rows, trained_at), trained_at),
            **report.metrics,
            **self.clock.finish(trained),
            "episodes_in_flight": float(self.dispatcher.episodes_in_flight),
        }

    def _unmasked(self, rows: Sequence[Row], version: int) -> Sequence[Row]:
        """The rows with the mask that the loss sees: the trainer leaves stale tokens out where it is told to."""
        if not self.config.rollout.mask_stale_tokens:
            return rows
        oldest = version - self.config.train.max_staleness
        return [replace(row, loss_mask=row.loss_mask & (row.versions >= oldest)) for row in rows]

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.add_metrics(record)
        self.reporter.step(record)

    def _check_some_were_trained(self) -> None:
        """The data is used up. Raises RunStoppedError when nothing came of it: there is no model that was trained."""
        if self.step:
            return
        ended = [group.outcome for group in self.dispatcher.held().groups]
        causes = {
            "had no episode with a verdict": ended.count("failed"),
            "were dropped by the group filter (scores all equal, or outside algo.filter.range)": ended.count(
                "filtered"
            ),
        }
        said = ", ".join(f"{count} of {len(ended)} {cause}" for cause, count in causes.items() if count)
        where = f" Their episodes are in {self.folder.rollouts(1)}." if said and self.config.log.rollouts else ""
        raise RunStoppedError(f"no group could be trained: {said or 'there was none'}.{where}")


def partial_rollouts(config: Config) -> bool:
    """Whether episodes go on across weight updates."""
    chosen = config.rollout.partial
    return config.train.max_staleness > 0 if chosen is None else chosen
