"""Reward functions of single-turn runs: called by the names of their parameters, combined by weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, EnvError

OFFERED = ("prompt", "completion", "label", "row", "images", "task")


@dataclass(frozen=True)
class Verdict:
    """What a reward function said. `reward` None = no verdict; `score` 0..1 None = the reward is the score."""

    reward: float | None
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_verdict(result: Any) -> Verdict:
    """A float, None, or {"reward", "score"?, "metrics"?}; NaN and inf are no verdict. Raises EnvError for anything else."""
    if isinstance(result, Mapping):
        return Verdict(_finite(result.get("reward")), _finite(result.get("score")), dict(result.get("metrics") or {}))
    return Verdict(_finite(result))


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        raise EnvError(f"a reward must be a number, None or a dict, not the string {value[:80]!r}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise EnvError(f"a reward must be a number, None or a dict, not {repr(value)[:80]}") from error
    return number if math.isfinite(number) else None


def check_reward(function: Callable[..., Any], name: str) -> None:
    """Raises ConfigError when a reward function asks for something it cannot be given."""
    for parameter in inspect.signature(function).parameters.values():
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and parameter.name not in OFFERED:
            raise ConfigError(
                f"--reward {name} wants {parameter.name!r}; a reward function is given {', '.join(OFFERED)} by name."
            )


def combine(verdicts: Sequence[Verdict], weights: Sequence[float]) -> Verdict:
    """The weighted sum; no verdict if one that counts gave none. The score is the first function's that gives one."""
    counted = [(v, w) for v, w in zip(verdicts, weights, strict=True) if w]
    metrics = {key: value for verdict in verdicts for key, value in verdict.metrics.items()}
    if not counted or any(verdict.reward is None for verdict, _ in counted):
        return Verdict(None, None, metrics)
    total = sum(weight * (verdict.reward or 0.0) for verdict, weight in counted)
    score = next((v.score for v in verdicts if v.score is not None), None)
    return Verdict(total, score, metrics)
