"""`agentrl eval`: how good a model is on held-out tasks."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from ..config import Config, EvalSection
from ..config.checks import check_engine, check_sources
from ..config.load import parse_command
from ..errors import ConfigError
from ..evaluation import Evaluator
from ..placement import Reservation
from ..preflight import Ready
from ..report.metrics import Metrics
from ..report.rollout_file import RolloutFile
from ..rollout.episode import EpisodeResult
from .console import out, progress_bar
from .exits import DONE, FAILED
from .playing import (
    ENGINES,
    Hidden,
    PlayCommand,
    PlayedSection,
    log_quietly,
    open_player,
    ready_to_play,
    run_until_signal,
)
from .summary import metrics_table, show_errors

DESCRIPTION = "Measure a model on held-out tasks: mean reward and score, and the unbiased pass@k."


class EvaluatedSection(PlayedSection):
    """How episodes are played; how they are sampled is said under eval."""

    temperature: Annotated[float, Hidden] = 1.0
    top_p: Annotated[float, Hidden] = 1.0
    top_k: Annotated[int, Hidden] = 0
    min_p: Annotated[float, Hidden] = 0.0
    sampler: Annotated[Literal["in_order", "shuffled", "by_pass_rate"], Hidden] = "shuffled"


class MeasuredSection(EvalSection):
    """What is measured."""

    every: Annotated[int, Hidden] = 0
    enable: Annotated[bool, Hidden] = True
    split: Annotated[str, tyro.conf.arg(aliases=["--split"])] = "test"
    """Split of the environment's tasks."""
    n: int = Field(0, ge=0)
    """Episodes of each task; 0 = as many as the largest k."""


class EvalCommand(PlayCommand):
    ks: Annotated[list[int], tyro.conf.arg(name="k", aliases=["-k"])] = [1]
    """For which k to report pass@k: the chance that one of k samples has score 1."""
    out: str | None = None
    """JSON file for the result."""
    rollouts: str | None = None
    """JSON lines file for the trajectories; their pictures go to images/ beside it."""
    rollout: EvaluatedSection = EvaluatedSection()
    eval: MeasuredSection = MeasuredSection()


def main(argv: list[str]) -> int:
    """The exit code of `agentrl eval ARGV`."""
    command = parse_command(EvalCommand, argv, prog="agentrl eval", description=DESCRIPTION)
    log_quietly(command.debug)
    config = settings(command)
    check_sources(config)
    check_engine(config, ENGINES)
    _check_out(command.out)
    metrics: Metrics = {}
    results: list[EpisodeResult] = []
    with ExitStack() as session:
        ready, reservation = ready_to_play(config, session)
        if not ready.held_out:
            raise ConfigError(f"There are no tasks for --eval.split {config.eval.split}.")
        run_until_signal(_evaluate(command, ready, reservation, metrics, results))
    title = f"{len(ready.held_out)} tasks x {config.eval.n} episodes, {ready.model_path}"
    out.print(metrics_table(title, metrics))
    show_errors(out, results)
    if command.out is not None:
        Path(command.out).write_text(json.dumps(report(ready, metrics, command.ks), indent=2) + "\n")
        out.print(f"written to {command.out}", markup=False)
    return FAILED if all(result.error is not None for result in results) else DONE


def settings(command: EvalCommand) -> Config:
    """The configuration with `eval.n` settled; a dataset without `data.test_path` is itself what is measured.

    Raises ConfigError for a k that n does not reach.
    """
    ks, n = command.ks, command.eval.n
    if not ks or min(ks) < 1:
        raise ConfigError("-k wants one or several numbers of at least 1.")
    if 0 < n < max(ks):
        raise ConfigError(f"pass@{max(ks)} needs --eval.n of at least {max(ks)}, not {n}.")
    data = command.data.model_dump()
    if command.data.path and not command.data.test_path:
        data["test_path"] = command.data.path
    return command.settings(eval={**command.eval.model_dump(), "enable": True, "n": n or max(ks)}, data=data)


def _check_out(path: str | None) -> None:
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {Path(path).parent}.")
    if path is not None and Path(path).is_dir():
        raise ConfigError(f"--out {path}: this is a folder, and the result is a file.")


async def _evaluate(
    command: EvalCommand, ready: Ready, reservation: Reservation, metrics: Metrics, results: list[EpisodeResult]
) -> None:
    with RolloutFile(command.rollouts) as file, progress_bar() as bar:

        def seen(result: EpisodeResult) -> None:
            results.append(result)
            file.add(result)
            bar("episodes", len(results) / evaluator.episodes)

        async with open_player(ready, file.images, reservation) as player:
            evaluator = Evaluator(ready.config, player, ready.held_out, ready.limits, ks=command.ks, seen=seen)
            found = await evaluator.run()
    metrics.update({key.removeprefix("eval/"): value for key, value in found.items()})


def report(ready: Ready, metrics: Metrics, ks: list[int]) -> dict[str, Any]:
    """What `--out` writes: the result and what it takes to repeat it."""
    config = ready.config
    data = config.data.test_path
    return {
        "model": ready.model_path,
        "env": config.env.name,
        "env_opt": config.env.opt,
        "data": data[0] if len(data) == 1 else data or None,
        "split": config.eval.split,
        "tasks": len(ready.held_out),
        "n": config.eval.n,
        "k": sorted(set(ks)),
        "temperature": config.eval.temperature,
        "seed": config.run.seed,
        "metrics": metrics,
    }
