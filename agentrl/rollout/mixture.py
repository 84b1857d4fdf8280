"""Task draws from several environments, by weight; each environment's tasks come in its own order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import Config
from ..env import Task
from ..seeds import derive
from .curriculum import Curriculum
from .task_source import DrawSource, TaskSource


class Mixture:
    """A draw is of one environment, chosen by the run's seed and the draw alone while all of them have tasks left. Within
    an environment the draws count from 0, so none of its tasks is passed over for the sake of the others.

    A draw keeps its environment and task until it is forgotten, so one issued again is the same; both are part of `state`.
    """

    def __init__(self, sources: Mapping[str, DrawSource], weights: Sequence[float], seed: int) -> None:
        self._sources = dict(sources)
        self._weights = dict(zip(sources, weights, strict=True))
        self._seed = seed
        self._taken = dict.fromkeys(sources, 0)
        self._ended: set[str] = set()
        self._assigned: dict[int, tuple[str, int]] = {}

    def at(self, draw: int) -> Task | None:
        """The task of a draw, with the name of its environment; None when every environment has come to its end."""
        if draw not in self._assigned:
            chosen = self._choose(draw)
            if chosen is None:
                return None
            self._assigned[draw] = chosen
        name, place = self._assigned[draw]
        task = self._sources[name].at(place)
        return None if task is None else replace(task, env=name)

    def _choose(self, draw: int) -> tuple[str, int] | None:
        """(environment, its own draw). One without tasks is left out from then on."""
        while left := [name for name in self._sources if name not in self._ended]:
            name = self._by_weight(draw, left)
            place = self._taken[name]
            if self._sources[name].at(place) is None:
                self._ended.add(name)
                continue
            self._taken[name] += 1
            return name, place
        return None

    def _by_weight(self, draw: int, left: Sequence[str]) -> str:
        edges = list(itertools.accumulate(self._weights[name] for name in left))
        point = derive(self._seed, "env of draw", draw) / 2**63 * edges[-1]
        return left[min(bisect.bisect_right(edges, point), len(left) - 1)]

    def note(self, draw: int, scores: Sequence[float]) -> None:
        if draw in self._assigned:
            name, place = self._assigned[draw]
            self._sources[name].note(place, scores)

    def forget(self, alive: Collection[int]) -> None:
        self._assigned = {draw: where for draw, where in self._assigned.items() if draw in alive}
        for name, source in self._sources.items():
            source.forget({place for owner, place in self._assigned.values() if owner == name})

    def state(self) -> dict[str, Any]:
        return {
            "taken": self._taken,
            "ended": sorted(self._ended),
            "assigned": {str(draw): list(where) for draw, where in self._assigned.items()},
            "sources": {name: source.state() for name, source in self._sources.items()},
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Environments that are no longer there are forgotten with their draws, new ones begin at 0."""
        if state is None or "sources" not in state:
            return
        self._taken |= {name: count for name, count in state["taken"].items() if name in self._sources}
        self._ended = set(state["ended"])
        self._assigned = {
            int(d): (name, place) for d, (name, place) in state["assigned"].items() if name in self._sources
        }
        for name, source in self._sources.items():
            source.restore(state["sources"].get(name))


def make_source(config: Config, tasks: Mapping[str, Iterable[Task]]) -> DrawSource:
    """What draws from the tasks of each environment, by name, as `rollout.sampler` and `rollout.retire_after` ask for."""
    seed = config.run.seed
    if len(tasks) == 1:
        return _source_of_one(config, next(iter(tasks.values())), seed)
    sources = {name: _source_of_one(config, own, derive(seed, "env", name)) for name, own in tasks.items()}
    return Mixture(sources, config.env.weights or [1.0] * len(sources), seed)


def _source_of_one(config: Config, tasks: Iterable[Task], seed: int) -> TaskSource:
    rollout = config.rollout
    shuffle, by_rate = rollout.sampler == "shuffled", rollout.sampler == "by_pass_rate"
    if by_rate or rollout.retire_after:
        return Curriculum(tasks, seed=seed, shuffle=shuffle, by_pass_rate=by_rate, retire_after=rollout.retire_after)
    return TaskSource(tasks, seed=seed, shuffle=shuffle)
