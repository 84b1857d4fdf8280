"""Metrics of a batch, from plain values. Means are over what has a value: a missing one is left out, never 0."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from ..group_statistics import pass_at_k
from ..rollout.episode import EpisodeResult
from ..rollout.group import Group
from ..trajectory import Row

Metrics = dict[str, float]


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    listed = list(values)
    return float(np.mean(listed)) if listed else None


def episode_metrics(results: Sequence[EpisodeResult]) -> Metrics:
    """Rewards and scores over episodes with a verdict; lengths, turns, truncation over episodes that did not fail;
    errors/<class> are counts; env/<key> are means over the episodes that reported the key.
    """
    judged = [result for result in results if result.has_verdict]
    played = [result for result in results if result.error is None]
    rewards = [float(result.total_reward or 0.0) for result in judged]
    found: dict[str, float | None] = {
        "reward/mean": mean(rewards),
        "reward/std": float(np.std(rewards)) if rewards else None,
        "reward/count": float(len(rewards)),
        "score/mean": mean(float(result.score) for result in judged if result.score is not None),
        "pass@1": _pass_at_1(judged),
        "length/action": mean(float(result.sampled_tokens) for result in played),
        "length/total": mean(float(sum(len(row) for row in result.rows)) for result in played if result.rows),
        "turns": mean(float(result.turns) for result in played),
        "truncated": mean(float(result.truncated) for result in played),
        "no_verdict": float(len(played) - len(judged)),
    }
    found |= {f"errors/{name}": float(count) for name, count in _errors(results).items()}
    found |= _env_metrics(played)
    return {key: value for key, value in found.items() if value is not None}


def _pass_at_1(judged: Sequence[EpisodeResult]) -> float | None:
    """Mean over groups of the share of members with score >= 1."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in judged:
        if result.score is not None:
            groups[result.group_id].append(float(result.score >= 1.0))
    return mean(float(np.mean(solved)) for solved in groups.values())


def _errors(results: Sequence[EpisodeResult]) -> Counter[str]:
    counts = Counter(str(result.error["class"]) for result in results if result.error is not None)
    counts["close"] = sum(int(result.metrics.get("errors/close", 0)) for result in results)
    return +counts


def _env_metrics(played: Sequence[EpisodeResult]) -> Metrics:
    values: dict[str, list[float]] = defaultdict(list)
    counted: Counter[str] = Counter({"renderer/branches": 0})
    for result in played:
        for key, value in result.metrics.items():
            if key.startswith("renderer/"):
                counted[key] += int(value)
            elif not key.startswith("errors/"):
                values[f"env/{key}"].append(value)
    return {key: float(np.mean(found)) for key, found in values.items()} | {k: float(v) for k, v in counted.items()}


def metrics_by_env(
    envs: Collection[str], results: Sequence[EpisodeResult], measure: Callable[[Sequence[EpisodeResult]], Metrics]
) -> Metrics:
    """What `measure` says of the episodes of each environment, as env/NAME/…; of a run with a single one nothing more."""
    found: Metrics = {}
    for name in envs if len(envs) > 1 else ():
        own = measure([result for result in results if result.env == name])
        found |= {f"env/{name}/{key.removeprefix('env/')}": value for key, value in own.items()}
    return found


def group_metrics(trained: Sequence[Group], dropped: Sequence[Group]) -> Metrics:
    """How many groups became what since the last batch."""
    outcomes = Counter(group.outcome for group in dropped)
    return {
        "groups/trained": float(len(trained)),
        "groups/filtered": float(outcomes["filtered"]),
        "groups/stale": float(outcomes["stale"]),
        "groups/failed": float(outcomes["failed"]),
    }


def staleness_metrics(batch: Sequence[Row], version: int) -> Metrics:
    """Over the rows of a batch trained at `version`: versions behind of the oldest trained token, distinct versions in a row."""
    rows = [row for row in batch if row.loss_mask.any()]
    if not rows:
        return {}
    behind = [version - row.oldest_version for row in rows]
    spread = [len(np.unique(row.versions[row.loss_mask])) for row in rows]
    return {
        "staleness/mean": float(np.mean(behind)),
        "staleness/max": float(max(behind)),
        "versions_per_row/mean": float(np.mean(spread)),
        "versions_per_row/max": float(max(spread)),
    }


def evaluation_metrics(results: Sequence[EpisodeResult], ks: Sequence[int]) -> Metrics:
    """reward/mean, score/mean and the unbiased pass@k: per task over its samples with a verdict, then the mean over tasks."""
    judged = [result for result in results if result.has_verdict]
    found: dict[str, float | None] = {
        "reward/mean": mean(float(result.total_reward or 0.0) for result in judged),
        "score/mean": mean(float(result.score) for result in judged if result.score is not None),
        "episodes": float(len(judged)),
        "excluded": float(len(results) - len(judged)),
    }
    tasks: dict[str, list[bool]] = defaultdict(list)
    for result in judged:
        tasks[result.group_id].append(result.score is not None and result.score >= 1.0)
    for k in ks:
        found[f"pass@{k}"] = mean(pass_at_k(len(s), sum(s), k) for s in tasks.values() if len(s) >= k)
    return {key: value for key, value in found.items() if value is not None}
