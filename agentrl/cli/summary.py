"""How a set of episodes went, for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from ..report.metrics import Metrics, episode_metrics, metrics_by_env
from ..rollout.episode import EpisodeResult
from .transcript import transcript

FIRST = ("reward/mean", "reward/std", "score/mean", "pass@1", "turns", "length/action", "length/total", "truncated")


def show_summary(console: Console, results: Sequence[EpisodeResult], envs: Collection[str], path: str | None) -> None:
    """One example, the numbers (of several `envs` those of each too), and what went wrong."""
    _example(console, results)
    metrics = episode_metrics(results) | metrics_by_env(envs, results, episode_metrics)
    ends = Counter(result.finish_reason for result in results if result.error is None)
    console.print(metrics_table(f"{len(results)} episodes", metrics))
    if ends:
        console.print(
            "ended by " + ", ".join(f"{reason} ({count})" for reason, count in ends.most_common()), markup=False
        )
    show_errors(console, results)
    if path is not None:
        console.print(f"written to {path}", markup=False)


def metrics_table(title: str, metrics: Metrics) -> Table:
    """Name and value, the usual names first."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key in [*(key for key in FIRST if key in metrics), *(key for key in metrics if key not in FIRST)]:
        value = metrics[key]
        table.add_row(key, f"{value:.0f}" if value == int(value) and abs(value) > 1 else f"{value:.4g}")
    return table


def show_errors(console: Console, results: Sequence[EpisodeResult]) -> None:
    """Each class of error with its count and the message of its first."""
    errors = [result.error for result in results if result.error is not None]
    for name, count in Counter(str(error["class"]) for error in errors).most_common():
        first = next(error for error in errors if error["class"] == name)
        console.print(f"{name} in {count} of {len(results)} episodes: {first['message']}", markup=False)


def _example(console: Console, results: Sequence[EpisodeResult]) -> None:
    """The first episode that was played to its end, else the first that failed."""
    result = next((result for result in results if result.error is None), results[0])
    if not result.messages:
        return
    console.print(f"episode {result.rollout_id}, task {result.task_id}", markup=False)
    for line in transcript(result.messages):
        console.print(line, markup=False)
    verdict = "no verdict" if result.total_reward is None else f"reward {result.total_reward:g}"
    score = "" if result.score is None else f", score {result.score:g}"
    console.print(f"{verdict}{score}, {result.turns} turns, ended by {result.finish_reason}\n", markup=False)
