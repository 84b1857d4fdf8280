"""`agentrl rollout`: play an environment without training, write the episodes down, say how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated

import tyro
from pydantic import Field

from ..config import EvalSection
from ..config.checks import check_engine, check_sources
from ..config.load import parse_command
from ..errors import ConfigError
from ..placement import Reservation
from ..preflight import Ready
from ..report.rollout_file import RolloutFile
from ..rollout.episode import EpisodeOrder, EpisodeResult
from ..rollout.mixture import make_source
from ..rollout.orders import draw_order
from ..rollout.player import Player, play_repeatedly
from ..rollout.task_source import TaskSource
from .console import out, progress_bar
from .exits import DONE, FAILED
from .playing import ENGINES, Hidden, PlayCommand, log_quietly, open_player, ready_to_play, run_until_signal
from .summary import show_summary

DESCRIPTION = "Play episodes without training: with a model on vLLM, with a script, or with random tokens."


class RolloutCommand(PlayCommand):
    tasks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = Field(8, ge=1)
    """Task draws to play."""
    samples: int = Field(1, ge=1)
    """Episodes of each draw."""
    best_of: int | None = Field(None, ge=2)
    """Play each draw so many times and keep the episode with the highest reward alone (rejection sampling), for agentrl sft."""
    split: str = "train"
    """Split the tasks are from."""
    out: str | None = None
    """JSON lines file for the trajectories, replaced if it is there; their pictures go to images/ beside it."""
    eval: Annotated[EvalSection, Hidden] = EvalSection()


def main(argv: list[str]) -> int:
    """The exit code of `agentrl rollout ARGV`."""
    command = parse_command(RolloutCommand, argv, prog="agentrl rollout", description=DESCRIPTION)
    log_quietly(command.debug)
    held_out = {"enable": command.split != "train", "split": command.split, "tasks": command.tasks}
    config = command.settings(eval=held_out)
    if command.best_of is not None and command.samples > 1:
        raise ConfigError("--samples is not used with --best-of, which says how often a draw is played.")
    if command.best_of is not None and command.out is None:
        raise ConfigError("--best-of keeps the best episodes: say where with --out FILE.jsonl.")
    check_sources(config)
    check_engine(config, ENGINES)
    results: list[EpisodeResult] = []
    with ExitStack() as session:
        ready, reservation = ready_to_play(config, session)
        orders = make_orders(command, ready)
        run_until_signal(_play(command, ready, reservation, orders, results))
    results.sort(key=lambda result: (result.draw, result.sample))
    show_summary(out, results, config.env.labels.values(), command.out)
    return FAILED if all(result.error is not None for result in results) else DONE


async def _play(
    command: RolloutCommand,
    ready: Ready,
    reservation: Reservation,
    orders: Sequence[EpisodeOrder],
    results: list[EpisodeResult],
) -> None:
    with RolloutFile(command.out) as file, progress_bar() as bar:
        best = BestOf(command.best_of or 1)

        def back(result: EpisodeResult) -> None:
            results.append(result)
            for kept in best.kept(result) if command.best_of else (result,):
                file.add(kept)
            bar("episodes", len(results) / len(orders))

        async with open_player(ready, file.images, reservation) as player:
            rollout = ready.config.rollout
            await play_all(player, orders, rollout.max_episodes, back, rollout.retries)


def make_orders(command: RolloutCommand, ready: Ready) -> list[EpisodeOrder]:
    """The draws that training with this seed would begin with, or the first tasks of another split. Raises ConfigError for a
    split without tasks.
    """
    config = ready.config
    training = command.split == "train"
    if not training and not ready.held_out:
        raise ConfigError(f"There are no tasks for --split {command.split}.")
    held_out = TaskSource(ready.held_out, seed=config.run.seed, shuffle=False) if not training else None
    source = held_out or make_source(config, ready.tasks)
    drawn = [(draw, task) for draw in range(command.tasks) if (task := source.at(draw)) is not None]
    return [
        draw_order(config, ready.limits, draw, sample, task, draw % config.engine.count)
        for draw, task in drawn
        for sample in range(command.best_of or command.samples)
    ]


class BestOf:
    """Of each draw's `n` episodes the one with the highest reward, the first of equals; none where none has a verdict."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._groups: dict[int, list[EpisodeResult]] = {}

    def kept(self, result: EpisodeResult) -> list[EpisodeResult]:
        """What is kept now that this episode is back: nothing before its group is complete."""
        group = self._groups.setdefault(result.draw, [])
        group.append(result)
        if len(group) < self._n:
            return []
        del self._groups[result.draw]
        judged = sorted((one for one in group if one.total_reward is not None), key=lambda one: one.sample)
        return [max(judged, key=lambda one: one.total_reward or 0.0)] if judged else []


async def play_all(
    player: Player,
    orders: Sequence[EpisodeOrder],
    at_once: int | None,
    back: Callable[[EpisodeResult], None],
    retries: int = 0,
) -> None:
    """Every order once, what infrastructure failed again; `back` gets each result as it comes."""
    seats = asyncio.Semaphore(at_once or len(orders))

    async def one(order: EpisodeOrder) -> None:
        async with seats:
            back(await play_repeatedly(player, order, retries))

    try:
        async with asyncio.TaskGroup() as group:
            for order in orders:
                group.create_task(one(order))
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
