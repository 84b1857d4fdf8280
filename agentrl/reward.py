"""Reward functions of single-turn runs: called by the names of their parameters, combined by weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, EnvError
from .step_info import finite

OFFERED = ("prompt", "completion", "label", "row", "images", "task", "prompt_text", "query")
"""`prompt_text` is the prompt as the model saw it, special tokens and all; `query` is that with the reply."""


@dataclass(frozen=True)
class Verdict:
    """What a reward function said. `reward` None = no verdict; `score` 0..1 None = the reward is the score."""

    reward: float | None
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_verdict(result: Any) -> Verdict:
    """A number, None, or {"reward", "score"?, "metrics"?}; NaN and inf are no verdict. Raises EnvError for anything else."""
    if not isinstance(result, Mapping):
        return Verdict(_verdict("a reward", result))
    if "reward" not in result or result.keys() - {"reward", "score", "metrics"}:
        raise EnvError(f"a reward's dict must have 'reward' and may have 'score', 'metrics'; got {sorted(result)}")
    metrics = result.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise EnvError(f"a reward's metrics must be a dict of names and numbers, not {repr(metrics)[:80]}")
    numbers = {str(key): finite(f"metric {key}", value) for key, value in metrics.items()}
    return Verdict(
        _verdict("a reward", result["reward"]),
        _verdict("a score", result.get("score")),
        {key: number for key, number in numbers.items() if number is not None},
    )


def _verdict(what: str, value: Any) -> float | None:
    return None if value is None else finite(what, value)


def check_reward(function: Callable[..., Any], name: str) -> None:
    """Raises ConfigError when a reward function asks for something it cannot be given."""
    for parameter in inspect.signature(function).parameters.values():
        open_ended = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not open_ended and parameter.name not in OFFERED:
            raise ConfigError(
                f"--reward {name} wants a parameter {parameter.name!r}; a reward function is given {', '.join(OFFERED)} by name."
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
