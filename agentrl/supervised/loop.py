"""The loop of supervised and preference training: take a batch, make one update; evaluate, save and export."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from ..checkpoint import Checkpoints, RunState
from ..config import SupervisedConfig
from ..loop import Reporter
from ..report.run_folder import RunFolder
from ..rollout.watchdog import within
from ..training import TrainReport
from ..whole_step import WholeStep
from .examples import Examples, Item
from .plan import SupervisedPlan

log = logging.getLogger(__name__)
T = TypeVar("T")


class Trainer(Protocol):
    """What the loop asks of a trainer. One call at a time. `agentrl.trainers.group.SupervisedGroup` is one."""

    async def train(self, items: list[Item], step: int) -> TrainReport: ...

    async def evaluate(self, items: list[Item]) -> dict[str, float]: ...

    async def reference(self, items: list[Item]) -> list[float]: ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


@dataclass
class SupervisedLoop:
    """The parts of one run and where it stands: `step` updates are made. A batch depends on its step and the seed alone, so
    a run that is resumed makes the updates that it would have made.
    """

    config: SupervisedConfig
    trainer: Trainer
    examples: Examples
    held_out: Examples | None
    plan: SupervisedPlan
    checkpoints: Checkpoints
    folder: RunFolder
    reporter: Reporter
    state: RunState = field(default_factory=RunState)
    _whole: WholeStep = field(default_factory=WholeStep)

    def __post_init__(self) -> None:
        self.step = self.state.step
        self._scored = (-1, 0.0)

    async def run(self) -> None:
        """Train to the end, then evaluate, save and export. Raises RunStoppedError when the run cannot go on."""
        if self.step == 0:
            await self._evaluate()
        while self.step < self.plan.steps:
            items = self.examples.batch(self.plan.indices(self.step + 1))
            await self._whole.run(self._train(items))
            if self._due(self.config.eval.every or self.plan.per_epoch) and self.step < self.plan.steps:
                await self._evaluate()
            due = self._due(self.config.ckpt.every) or self.checkpoints.overdue or self._is_best
            if due and self.step < self.plan.steps:
                await self.save()
        await self._finish()

    async def _train(self, items: list[Item]) -> None:
        """One update; none where all rows of the batch are left out."""
        began = time.monotonic()
        metrics = await self._updated(items) if items else {}
        self.step += 1
        seconds, tokens = time.monotonic() - began, sum(map(len, items))
        record = {
            "step": self.step,
            "epoch": self.plan.epoch(self.step) + 1,
            **metrics,
            "tokens": float(tokens),
            "time/step": seconds,
            "throughput/tokens": tokens / seconds,
        }
        self.folder.add_metrics(record)
        self.reporter.step(record)

    async def _updated(self, items: list[Item]) -> dict[str, float]:
        report = await self._watched(self.trainer.train(items, self.step + 1), f"the trainer, in step {self.step + 1}")
        return report.metrics

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of this moment would be consistent: something was trained, and no update is half made."""
        return self.step > 0 and not self._whole.half_done

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        self.state = self.checkpoints.go_on_from(checkpoint)
        await self._watched(self.trainer.load(checkpoint), f"the trainer to load {checkpoint}")

    async def save(self) -> None:
        """A checkpoint of this moment; the lowest loss makes the best. Raises RunStoppedError when it fails."""
        self.state = replace(self.state, step=self.step)
        if self._is_best:
            self.state = replace(self.state, best=self._scored[1], best_step=self.step)
        await self._watched(self.checkpoints.save(self.state, self.trainer.save), f"the checkpoint of step {self.step}")

    @property
    def _is_best(self) -> bool:
        """Whether the present weights were evaluated, and no checkpoint was as good."""
        step, score = self._scored
        return step == self.step > 0 and (self.state.best is None or score > self.state.best)

    async def _evaluate(self) -> None:
        """The held-out examples with the present weights, once a step."""
        if self.held_out is None or self.state.evaluated == self.step:
            return
        items = self.held_out.batch(range(len(self.held_out)))
        found = await self._watched(self.trainer.evaluate(items), "the evaluation")
        record = {"step": self.step, **{f"eval/{name}": value for name, value in found.items()}}
        self.folder.amend_metrics(record)
        self.reporter.evaluation(record)
        self.state = replace(self.state, evaluated=self.step)
        self._scored = (self.step, -found["loss"])

    async def _finish(self) -> None:
        await self._evaluate()
        if self.held_out is None and self.config.kind == "rm":
            first = self.examples.batch(range(min(self.config.eval.samples, len(self.examples))))
            await self._watched(self.trainer.evaluate(first), "the scale of the scores")
        await self.save()
        exporting = self._watched(self.trainer.export(self.folder.final), "the export of the model")
        await self.checkpoints.then(f"the export of the model to {self.folder.final}", exporting)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    async def _watched(self, awaitable: Awaitable[T], what: str) -> T:
        watch = self.config.watchdog
        return await within(awaitable, what, warn_after=watch.warn_after, fail_after=watch.fail_after)
