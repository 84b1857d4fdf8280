"""Tasks chosen by how often they are solved. What was learned of them is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from ..env import Task
from ..errors import ConfigError
from ..seeds import derive
from .task_source import TaskSource
from .weighted import Weighted


@dataclass
class PassRecord:
    """Of one task: members with a verdict, those with a score of at least 1, and groups in a row that were solved whole, or
    that got no verdict.
    """

    played: int = 0
    passed: int = 0
    streak: int = 0
    unjudged: int = 0

    def add(self, scores: Collection[float]) -> None:
        solved = sum(score >= 1.0 for score in scores)
        self.played += len(scores)
        self.passed += solved
        self.streak = self.streak + 1 if scores and solved == len(scores) else 0
        self.unjudged = 0 if scores else self.unjudged + 1

    @property
    def weight(self) -> float:
        """p (1 - p) of the pass rate under a flat prior: most for tasks that are solved half the time or not yet known. It halves
        with each group in a row without a verdict: of a task that is broken nothing is ever known.
        """
        rate = (self.passed + 1) / (self.played + 2)
        return rate * (1.0 - rate) * 0.5**self.unjudged


class Curriculum(TaskSource):
    """Draws by pass rate, or pass after pass as `TaskSource` does; a task that was solved whole `retire_after` times in a
    row (0 = never) is left out. A draw keeps its task until it is forgotten, so one issued again is the same task.
    """

    def __init__(
        self, tasks: Iterable[Task], *, seed: int, shuffle: bool, by_pass_rate: bool, retire_after: int = 0
    ) -> None:
        super().__init__(tasks, seed=seed, shuffle=shuffle)
        if self._sequence is None:
            raise ConfigError(
                "--rollout.sampler by_pass_rate and --rollout.retire-after need tasks that can be counted, not a stream."
            )
        self._by_pass_rate = by_pass_rate
        self._retire_after = retire_after
        self._records = [PassRecord() for _ in range(len(self._sequence))]
        self._weights = Weighted(len(self._sequence), PassRecord().weight)
        self._assigned: dict[int, int] = {}
        self._noted: set[int] = set()
        self._place = 0

    def at(self, draw: int) -> Task | None:
        """The task of a draw, chosen when it is first asked for; None when every task is retired."""
        assert self._sequence is not None
        if draw not in self._assigned:
            index = self._by_rate(draw) if self._by_pass_rate else self._next()
            if index is None:
                return None
            self._assigned[draw] = index
        return self._sequence[self._assigned[draw]]

    def _retired(self, index: int) -> bool:
        return 0 < self._retire_after <= self._records[index].streak

    def _by_rate(self, draw: int) -> int | None:
        return self._weights.at(np.random.default_rng(derive(self._seed, "tasks", draw)).random())

    def _next(self) -> int | None:
        """The next task of the pass that is not retired."""
        for _ in self._records:
            index = self._index(self._place)
            self._place += 1
            if not self._retired(index):
                return index
        return None

    def note(self, draw: int, scores: Sequence[float]) -> None:
        """The first time a draw's group finishes it counts; a group that got too old is played again with the same seeds."""
        if draw not in self._assigned or draw in self._noted:
            return
        self._noted.add(draw)
        index = self._assigned[draw]
        self._records[index].add(scores)
        self._weigh(index)

    def _weigh(self, index: int) -> None:
        self._weights.set(index, 0.0 if self._retired(index) else self._records[index].weight)

    def forget(self, alive: Collection[int]) -> None:
        self._assigned = {draw: index for draw, index in self._assigned.items() if draw in alive}
        self._noted &= self._assigned.keys()

    def state(self) -> dict[str, Any]:
        records = {str(i): astuple(record) for i, record in enumerate(self._records) if record != PassRecord()}
        assigned = {str(draw): index for draw, index in self._assigned.items()}
        return {"place": self._place, "records": records, "assigned": assigned, "noted": sorted(self._noted)}

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self._place = state["place"]
        self._assigned = {int(draw): index for draw, index in state["assigned"].items()}
        self._noted = set(state.get("noted", ()))
        for index, values in state["records"].items():
            if int(index) < len(self._records):
                self._records[int(index)] = PassRecord(*values)
                self._weigh(int(index))
