"""`agentrl train`: check everything that can be checked, then run."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from ..cluster import check_gpus, connected, cpus_of_run
from ..collector import spare_collector
from ..config import Config
from ..config.checks import AlgorithmFacts, check_training, filters_groups
from ..config.dump import to_toml
from ..config.load import parse_command, with_stored_config
from ..config.plan import Plan, describe, make_plan
from ..errors import ConfigError
from ..model_folder import is_small
from ..placement import Reservation, reserved, wanted_by_run
from ..preflight import Ready, look, make_ready
from ..report.run_folder import RunFolder
from ..training_run import RunParts, StartTrainer, train_run
from .console import out
from .exits import DONE, INTERRUPTED
from .policy import choose_model, with_folders
from .signals import terminable, until_signal
from .training import begun, check_sinks, interrupted_lines, reporter_of, run_folder

DESCRIPTION = "Train a policy on an environment. Every option has a section; the short forms are shown first."


class TrainCommand(Config):
    config: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """TOML or YAML file with options; flags win over it."""
    dry_run: bool = False
    """Print the effective configuration and the plan, and exit."""
    debug: bool = False
    """Show stack traces."""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl train ARGV`."""
    argv = with_stored_config(argv, Config.kind)
    command = parse_command(TrainCommand, argv, prog="agentrl train", description=DESCRIPTION)
    config = Config(**{name: getattr(command, name) for name in Config.model_fields})
    logging.basicConfig(level=logging.DEBUG if command.debug else logging.WARNING, format="%(levelname)s %(message)s")
    algorithm = algorithm_facts(config)
    check_training(config, algorithm)
    check_sinks(config)
    what = config.env.shown or Path((config.data.path or ["data"])[0]).stem
    folder, resume_from = run_folder(config, what, config.algo.name.rpartition(":")[2])
    with ExitStack() as session:
        ready, gpus = _preflight(config, session, dry=command.dry_run)
        plan = make_plan(config, ready.total, tiny=is_small(ready.model_path))
        filters = filters_groups(config.algo, algorithm)
        _show(ready, plan, gpus, filters)
        if command.dry_run:
            out.print(to_toml(config), markup=False, highlight=False)
            return DONE
        reservation = session.enter_context(reserved(wanted_by_run(config, gpus), gpus, config.watchdog))
        session.enter_context(begun(folder, config, resume_from))
        starter = _trainer_starter(reservation)
        parts = RunParts(ready, plan, folder, filters, reservation, starter, resume_from)
        return _run(parts)


def algorithm_facts(config: Config) -> AlgorithmFacts:
    """The preset of `--algo` with `--algo.advantage` in place. Raises ConfigError: an unknown name, with the nearest; a
    composition of a user's own that cannot be.
    """
    from agentrl.trainers.advantages import find_estimator
    from agentrl.trainers.estimators import algorithm
    from agentrl.trainers.trust import check_trust

    algo = config.algo
    try:
        preset = algorithm(algo.name)
        estimator = find_estimator(algo.advantage or preset.advantage)
        trust = algo.trust or preset.trust
        check_trust(algo.level or preset.level, trust, algo.clip or preset.clip, None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return AlgorithmFacts(
        config.algo.name,
        estimator.grouped,
        estimator.critic,
        preset.filter_groups,
        preset.overlong_penalty,
        estimator.by_turn,
        estimator.discounted,
        estimator.teacher,
        trust,
    )


def _preflight(config: Config, session: ExitStack, *, dry: bool) -> tuple[Ready, float]:
    """(what is known before anything loads, the GPUs there are). Joins Ray for as long as `session` lasts, and only after
    the environment and the data have been looked at.
    """
    looked = look(config)
    session.enter_context(connected(cpus_of_run(config)))
    session.enter_context(terminable())
    gpus = check_gpus(config)
    looked = replace(looked, config=with_folders(config))
    return make_ready(looked, choose_model(config, looked.facts.images > 0, gpus, trained=not dry)), gpus


def _run(parts: RunParts) -> int:
    with reporter_of(parts.config, parts.folder, parts.plan.steps) as reporter:
        spare_collector()
        interrupted = asyncio.run(until_signal(train_run(parts, reporter)))
    for line in _ending(parts.folder, interrupted):
        out.print(line, highlight=False, soft_wrap=True)
    return INTERRUPTED if interrupted else DONE


def _ending(folder: RunFolder, interrupted: bool) -> list[str]:
    """What came of the run, and what can be done next."""
    if interrupted:
        return interrupted_lines(folder, Config.kind)
    records = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    results = [record for record in records if "eval/reward/mean" in record]
    lines = [f"Done: {folder.path}"]
    if len(results) > 1:
        first, last = results[0]["eval/reward/mean"], results[-1]["eval/reward/mean"]
        lines.insert(0, f"held-out reward {first:.3f} before, {last:.3f} after {results[-1]['step']} steps")
    return [*lines, f"The model: {folder.final}"]


def _show(ready: Ready, plan: Plan, gpus: float, filters: bool) -> None:
    where = f"{gpus:g} GPUs" if gpus else "CPU"
    held_out = f"{len(ready.held_out)} held-out tasks" if ready.held_out else "no held-out tasks: no evaluation"
    turns = "1 turn" if ready.limits.max_turns == 1 else f"{ready.limits.max_turns} turns"
    lines = [
        f"model {ready.model_path} on {where}; {held_out}",
        *describe(ready.config, plan, ready.total, filters=filters),
        f"a turn samples at most {ready.limits.max_new_tokens} tokens, an episode has at most {turns} and "
        f"{ready.limits.max_len} tokens of context",
    ]
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def _trainer_starter(reservation: Reservation) -> StartTrainer:
    from agentrl.trainers.group import TrainerGroup

    return partial(TrainerGroup.start, reservation=reservation)
