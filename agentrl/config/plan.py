"""The arithmetic of a run, as it is shown before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..rollout.staleness import places
from .config import Config

TINY_LR, LR = 2e-4, 1e-6
LORA_LR_FACTOR = 10.0
"""Adapters learn best at about ten times the rate of the whole model (Schulman 2025, "LoRA Without Regret")."""


@dataclass(frozen=True)
class Plan:
    """How many batches and updates a run makes: rollouts in a batch, updates in all, the horizon of the learning rate."""

    steps: int
    rollouts: int
    updates: int
    lr: float

    @property
    def updates_per_step(self) -> int:
        return self.updates // self.steps


def make_plan(config: Config, total_tasks: int | None, *, tiny: bool) -> Plan:
    """Without `train.steps`, `train.passes` over the tasks, the short last batch included. Raises ConfigError without an end."""
    train = config.train
    if train.steps is not None:
        steps: int = train.steps
    elif total_tasks is None:
        raise ConfigError("The tasks have no known end: say how many batches to train with --train.steps.")
    else:
        steps = math.ceil((draws_in_all(config, total_tasks) or 0) / train.batch_groups)
    rollouts = train.batch_groups * config.rollout.n_samples
    updates = planned_updates(
        prompts=train.batch_groups,
        n=config.rollout.n_samples,
        train_batch=rollouts // train.updates_per_batch,
        epochs=train.epochs,
        rollouts=steps,
        episodes=1,
    )
    return Plan(steps=steps, rollouts=rollouts, updates=updates, lr=config.optim.lr or _default_lr(config, tiny))


def planned_updates(*, prompts: int, n: int, train_batch: int, epochs: int, rollouts: int, episodes: int) -> int:
    """Optimizer updates of a run; micro-batches, ranks and rows per rollout do not enter.

    prompts = prompts of one batch taken, n = samples of each, train_batch = rollouts in one update, epochs = passes
    over a taken batch, rollouts = batches taken in one pass over the data, episodes = such passes. A remainder of the
    batch is an update of its own. Raises ValueError unless all are at least 1.
    """
    counts = {"prompts": prompts, "n": n, "train_batch": train_batch}
    counts |= {"epochs": epochs, "rollouts": rollouts, "episodes": episodes}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")
    updates_per_pass = -(-prompts * n // train_batch)
    return updates_per_pass * epochs * rollouts * episodes


def draws_in_all(config: Config, total_tasks: int | None) -> int | None:
    """Task draws until the data is used up; None where `train.steps` or nothing ends the run."""
    if config.train.steps is not None or total_tasks is None:
        return None
    return total_tasks * config.train.passes


def _default_lr(config: Config, tiny: bool) -> float:
    return (TINY_LR if tiny else LR) * (LORA_LR_FACTOR if config.lora.enabled else 1.0)


def describe(config: Config, plan: Plan, total_tasks: int | None, *, filters: bool = False) -> list[str]:
    """The plan in lines for a person. `filters` = groups without signal are dropped."""
    train, n = config.train, config.rollout.n_samples
    tasks = "tasks without a known end" if total_tasks is None else f"{total_tasks} tasks"
    at_once = places(train.batch_groups, train.max_staleness, oversample=config.rollout.oversample)
    lines = [
        f"{train.batch_groups} groups x {n} samples = {plan.rollouts} rollouts a step, "
        f"{plan.updates_per_step} update{'s' if plan.updates_per_step > 1 else ''} a step, "
        f"micro-batches of at most {train.micro_batch_tokens} tokens",
        f"{plan.steps} steps from {tasks}: {plan.updates} updates, lr {plan.lr:g} ({config.optim.schedule})",
        f"staleness at most {train.max_staleness}: up to {at_once} groups at once",
    ]
    if filters and train.steps is None and config.optim.schedule != "constant":
        lines.append(
            "the group filter uses up tasks: as many steps only if it drops nothing, and with fewer the learning rate ends above "
            "its minimum. With --train.steps the filter changes neither."
        )
    return lines
