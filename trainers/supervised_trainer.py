"""One rank of supervised and preference training: sft, rm and dpo are one trainer with another loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ..config import DpoConfig, SupervisedConfig
from ..supervised.examples import Item, rows_of
from ..training import TrainReport
from ..trajectory import Row
from .backend import Place, gather
from .batch import MicroBatch, Update, plan_updates
from .core import Core, enter
from .metrics import Mean, averages, merge
from .models import SCORE
from .reading import check_vocabulary, open_model
from .reference import FrozenPolicy
from .scoring import Read, Share
from .supervised_losses import Totals, find_loss
from .updating import LossShare, Parts, Updates


class SupervisedTrainer:
    """Trains one model on rows or pairs. With several ranks each has one of these, and every method is called on all of them
    alike, with the same items. Arguments as of `PolicyTrainer`.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        model_path: str,
        image_dir: str,
        planned_updates: int,
        default_lr: float,
        place: Place | None = None,
    ) -> None:
        place = place or Place()
        device = enter(config, place)
        self._config = config
        self._where = (model_path, image_dir)
        self._loss = find_loss(config)
        self.reader = open_model(
            config,
            model_path,
            image_dir,
            trained=True,
            device=device,
            ranks=place.ranks,
            lora=config.lora,
            head=self._loss.head,
        )
        self.core = Core(
            config,
            self._loss.module(self.reader.policy),
            self.reader,
            place=place,
            model_path=model_path,
            image_dir=image_dir,
            planned_updates=planned_updates,
            default_lr=default_lr,
            head=self._loss.head,
        )
        self._judge: Read | None = None

    def train(self, items: Sequence[Item], step: int) -> TrainReport:
        """One optimizer update. Raises ConfigError when an item is longer than a micro-batch, and DivergenceError after too
        many updates with numbers that are not finite.
        """
        self._judge = None
        core, update, totals = self.core, self._plan(items), Totals.of(items)
        updates = Updates(core.backend, core.rank, [len(item) for item in items])
        rate = core.rate(core.counters.updates)
        core.counters.updates += 1
        norm = updates.make(update, rate, lambda rows, counted: self._share(items, rows, totals, counted))
        suspects = [] if math.isfinite(norm) else rows_of([items[i] for i in updates.suspects() or update.rows])
        moved = core.made(norm, f"{self._config.kind}, step {step}", step, suspects)
        if moved:
            core.average()
        seen = {**_described(updates.averages()), "lr": rate, "bad_steps": float(core.counters.bad_steps)}
        return TrainReport(moved, {f"train/{name}": value for name, value in seen.items()})

    @torch.no_grad()
    def evaluate(self, items: Sequence[Item]) -> dict[str, float]:
        """The loss over all items as over one update, and its metrics, of the weights that `export` writes. A reward model's
        scores are from then on normalised by the mean and deviation that they have here.
        """
        self._judge = None
        update, totals = self._plan(items), Totals.of(items)
        parts: list[Parts] = [{"loss": Mean(0.0, 1.0)}] if self.core.rank == 0 else []
        filler = (min(update.rows, key=lambda i: len(items[i])),)
        with self.core.averaged():
            for step in update.steps:
                rows = step[self.core.rank]
                share = self._share(items, rows or filler, totals, bool(rows))
                parts.append({**share.metrics, "loss": Mean(float(share.loss), 0.0)})
        found = _described(averages(merge(gather(merge(parts)))))
        if self._loss.head == SCORE:
            self.core.describe(mean=found["score_mean"], std=found["score_std"])
        return found

    def reference(self, items: Sequence[Item]) -> list[float]:
        """The reference's log-probability of each answer, summed over its tokens, in the order of `rows_of(items)`. Of the
        run's own model it is that of the present weights: to be asked before the first update. Another model stays in memory
        until the next update or evaluation.
        """
        self._judge = self._judge or self._reader_of_reference()
        rows = rows_of(items)
        lengths = [len(row) for row in rows]
        budget = self._config.train.micro_batch_tokens
        (plan,) = plan_updates(range(len(rows)), lengths, [True] * len(rows), ranks=self.core.ranks, budget=budget)
        (logp,) = Share(rows, plan.steps, self.core.rank).evaluate(self._judge)
        sums: list[float] = logp.double().sum(1).tolist()
        return sums

    def _reader_of_reference(self) -> Read:
        config, (model_path, image_dir) = self._config, self._where
        path = config.ref.path if isinstance(config, DpoConfig) else None
        if path is None:
            return self._read
        check_vocabulary(config, path, model_path, "--ref.path")
        reader = open_model(config, path, image_dir, trained=False, device=self.core.device)
        frozen = FrozenPolicy(reader, 1.0, offload=False)
        return lambda rows: (frozen.log_probs(rows),)

    def _read(self, rows: Sequence[Row]) -> Sequence[Sequence[torch.Tensor]]:
        return self.reader(self.core.backend, rows)

    def _share(self, items: Sequence[Item], rows: MicroBatch, totals: Totals, counted: bool) -> LossShare:
        some = [items[i] for i in rows]
        share = self._loss.share(self._read(rows_of(some)), some, totals)
        return share if counted else LossShare(share.loss * 0.0, share.output, {}, torch.zeros_like(share.bad))

    def _plan(self, items: Sequence[Item]) -> Update:
        """One update of all items, a pair in one micro-batch."""
        (update,) = plan_updates(
            range(len(items)),
            [len(item) for item in items],
            [True] * len(items),
            ranks=self.core.ranks,
            budget=self._config.train.micro_batch_tokens,
            half_cost=self.reader.policy.half_cost,
        )
        return update

    def save(self, folder: Path) -> None:
        """See Core.save."""
        self.core.save(folder)

    def load(self, folder: Path) -> None:
        """See Core.load."""
        self.core.load(folder)

    def export(self, folder: Path) -> None:
        """See Core.export."""
        self.core.export(folder)

    def close(self) -> None:
        """Leave the process group."""
        self.core.close()


def _described(found: dict[str, float]) -> dict[str, float]:
    """The deviation of the scores in place of the mean of their squares."""
    if "score_square" not in found:
        return found
    square = found.pop("score_square")
    return {**found, "score_std": math.sqrt(max(0.0, square - found["score_mean"] ** 2))}
