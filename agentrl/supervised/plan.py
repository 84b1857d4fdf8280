"""The arithmetic of a supervised run: which items make up which update. Pure functions of counts and the seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from ..config import DpoConfig, SupervisedConfig
from ..config.plan import LORA_LR_FACTOR
from ..seeds import derive

LR = {"sft": 1e-5, "rm": 1e-5, "dpo": 1e-6}
TINY_LR = {"sft": 1e-3, "rm": 1e-3, "dpo": 1e-4}


@dataclass(frozen=True)
class SupervisedPlan:
    """steps = updates of the run, per_epoch = of one pass over `items` items."""

    items: int
    batch: int
    per_epoch: int
    steps: int
    lr: float
    seed: int
    shuffle: bool
    _order: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def epoch(self, step: int) -> int:
        """The pass that update `step` (from 1) belongs to, from 0."""
        return (step - 1) // self.per_epoch

    def indices(self, step: int) -> list[int]:
        """The items of update `step` (from 1): every pass takes each item once, in an order that depends on the seed alone."""
        order = self._order_of(self.epoch(step))
        start = (step - 1) % self.per_epoch * self.batch
        return order[start : start + self.batch]

    def _order_of(self, epoch: int) -> list[int]:
        """The items in the order of a pass; that of the last pass asked for is kept, as shuffling a million takes half a
        second.
        """
        if epoch not in self._order:
            order = list(range(self.items))
            if self.shuffle:
                random.Random(derive(self.seed, "examples", epoch)).shuffle(order)
            self._order.clear()
            self._order[epoch] = order
        return self._order[epoch]


def make_plan(config: SupervisedConfig, items: int, *, tiny: bool) -> SupervisedPlan:
    """The last update of a pass takes what is left."""
    train = config.train
    per_epoch = math.ceil(items / train.batch)
    lr = config.optim.lr or (TINY_LR if tiny else LR)[config.kind] * (LORA_LR_FACTOR if config.lora.enabled else 1.0)
    steps = train.steps if train.steps is not None else per_epoch * train.epochs
    return SupervisedPlan(items, train.batch, per_epoch, steps, lr, config.run.seed, train.shuffle)


def describe(config: SupervisedConfig, plan: SupervisedPlan) -> list[str]:
    """The plan in lines for a person."""
    unit = "examples" if config.kind == "sft" else "pairs"
    passes = plan.steps / plan.per_epoch
    lines = [
        f"{plan.items} {unit} in updates of {plan.batch}: {plan.per_epoch} updates a pass, {plan.steps} updates in all "
        f"({passes:.3g} passes), micro-batches of at most {config.train.micro_batch_tokens} tokens",
        f"lr {plan.lr:g} ({config.optim.schedule})",
    ]
    if isinstance(config, DpoConfig):
        whose = config.ref.path or "the model itself, before the first update"
        lines.append(f"reference: {whose}; its log-probabilities are computed once")
    return lines
