"""What an env's `info` may say, read into values of known types: the boundary between user data and the record."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .engine import Sampling
from .errors import EnvError

ALLOWED_SAMPLING = ("max_new_tokens", "stop")


@dataclass(frozen=True)
class Info:
    """One step's info. `max_new_tokens`, `stop` and `changes` (fields of `Sampling`, evaluation only) are for the next turn."""

    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def read_info(info: Mapping[str, Any], env: str, *, training: bool) -> Info:
    """Metrics that are NaN or inf are left out. Raises EnvError for a value of the wrong type or a refused option."""
    metrics = _mapping(info, "metrics", env)
    numbers = {str(key): finite(f"{env}: info['metrics'][{key!r}]", value) for key, value in metrics.items()}
    sampling = _mapping(info, "sampling", env)
    cap, stop = sampling.get("max_new_tokens"), sampling.get("stop")
    return Info(
        score=None if info.get("score") is None else finite(f"{env}: info['score']", info["score"]),
        metrics={key: number for key, number in numbers.items() if number is not None},
        max_new_tokens=None if cap is None else whole_number(f"{env}: info['sampling']['max_new_tokens']", cap),
        stop=None if stop is None else _strings(f"{env}: info['sampling']['stop']", stop),
        changes=_changes(sampling, env, training),
    )


def finite(what: str, value: Any) -> float | None:
    """A finite number as a float; None for NaN and inf. Raises EnvError for what is no number."""
    if isinstance(value, str | bytes):
        raise EnvError(f"{what} must be a number, not {value[:80]!r}")
    try:
        number = float(value)
    except Exception as error:  # `__float__` of the user's object
        raise EnvError(f"{what} must be a number, not {repr(value)[:80]}") from error
    return number if math.isfinite(number) else None


def whole_number(what: str, value: Any) -> int:
    """A whole number of at least 1. Raises EnvError for anything else."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise EnvError(f"{what} must be a whole number, not {repr(value)[:80]}") from error
    if number < 1:
        raise EnvError(f"{what} must be at least 1, not {number}")
    return number


def _mapping(info: Mapping[str, Any], key: str, env: str) -> Mapping[str, Any]:
    value = info.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvError(f"{env}: info[{key!r}] must be a dict, not {repr(value)[:80]}")
    return value


def _strings(what: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) and item for item in given):
        raise EnvError(f"{what} must be a text or a list of texts, not {repr(value)[:80]}")
    return tuple(given)


def _changes(sampling: Mapping[str, Any], env: str, training: bool) -> dict[str, Any]:
    changes = {key: value for key, value in sampling.items() if key not in ALLOWED_SAMPLING}
    if changes and training:
        raise EnvError(
            f"{env}: info['sampling'] may set {' and '.join(ALLOWED_SAMPLING)}; {', '.join(map(str, changes))} "
            "would change the distribution that is trained"
        )
    known = {one.name for one in fields(Sampling)} - {"seed"}
    if changes.keys() - known:
        raise EnvError(f"{env}: info['sampling'] has no {', '.join(sorted(map(str, changes.keys() - known)))}")
    return changes
