"""Advantage estimators by name.

An estimator is one function `Decisions -> advantages[R, L]`, before whitening:

    @register_advantage("mine", whiten=True)
    def mine(d: Decisions) -> Tensor:
        return d.token_rewards - d.penalty

What it returns at slots that are not trained, or for rollouts that are not valid, is dropped. Its file is named with
`--algo path/to/file.py:mine`; a package names the function, or a Preset, in the entry point group `agentrl.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..registry import suggest
from .decisions import Decisions
from .plugins import from_outside
from .presets import Preset, find_preset, preset_names

Function = Callable[[Decisions], Tensor]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator and what it asks of the data.

    whiten = its default; grouped = compares members of a group, so a group with fewer than two valid ones gives no
    signal; critic = needs `values`, and its returns are advantage + value; by_turn = takes `token_rewards`; discounted =
    reads gamma; teacher = `kl` is that from a teacher, not from the reference.
    """

    name: str
    function: Function
    whiten: bool
    grouped: bool
    critic: bool
    by_turn: bool
    discounted: bool
    teacher: bool


_estimators: dict[str, Estimator] = {}


def register_advantage(
    name: str,
    *,
    whiten: bool = False,
    grouped: bool = False,
    critic: bool = False,
    by_turn: bool = True,
    discounted: bool = True,
    teacher: bool = False,
) -> Callable[[Function], Function]:
    """Decorator: give an estimator a name for `compute_advantages` and `--algo`. The last registration of a name holds."""

    def register(function: Function) -> Function:
        _estimators[name] = Estimator(name, function, whiten, grouped, critic, by_turn, discounted, teacher)
        return function

    return register


def find_estimator(name: str) -> Estimator:
    """The estimator of an advantage, preset, alias or `path/to/file.py:name`. Raises ValueError with the nearest names."""
    if name in _estimators:
        return _estimators[name]
    if name in preset_names():
        return _estimators[find_preset(name).advantage]
    found = from_outside(name)
    if isinstance(found, Preset):
        return find_estimator(found.advantage)
    for estimator in _estimators.values():
        if estimator.function is found:
            return estimator
    if found is not None:
        raise ValueError(f"{name} is neither decorated with @register_advantage nor a Preset.")
    known = sorted({*_estimators, *preset_names()})
    raise ValueError(
        f"There is no algorithm or advantage named {name!r}.{suggest(name, known)} Known: {', '.join(known)}."
    )


def algorithm(name: str) -> Preset:
    """The composition that `--algo NAME` starts from: a preset, or the default axes around an estimator."""
    if name in preset_names():
        return find_preset(name)
    if name not in _estimators and isinstance(preset := from_outside(name), Preset):
        return preset
    return Preset(name, find_estimator(name).name)
