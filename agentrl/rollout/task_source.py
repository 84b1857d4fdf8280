"""Which task a draw is: a pure function of the run's seed and the draw, so a resumed run goes on where it was."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ..env import Task
from ..errors import DataError
from ..seeds import derive


class DrawSource(Protocol):
    """What gives each task draw of a run its task."""

    def at(self, draw: int) -> Task | None:
        """The task of a draw; None when there are no more. New draws are asked for in order."""
        ...

    def note(self, draw: int, scores: Sequence[float]) -> None:
        """The group of a draw has finished."""
        ...

    def forget(self, alive: Collection[int]) -> None:
        """No other draws than these will be asked for again, new ones left aside."""
        ...

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps besides the number of draws; None = nothing."""
        ...

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from what `state` gave."""
        ...


class TaskSource:
    """Tasks by draw index. A Sequence is passed over again and again, shuffled anew each pass when asked for;
    any other iterable is read once, in order, as far as needed.

    `total` = draws in one pass, None for an iterable that is no Sequence.
    """

    def __init__(self, tasks: Iterable[Task], *, seed: int, shuffle: bool, what: str = "the environment") -> None:
        self._seed = seed
        self._shuffle = shuffle
        self._what = what
        self._sequence = tasks if isinstance(tasks, Sequence) else None
        self._stream: Iterator[Task] = iter(()) if isinstance(tasks, Sequence) else iter(tasks)
        self._seen: dict[int, Task] = {}
        self._read = 0
        self._orders: dict[int, np.ndarray] = {}
        if self._sequence is not None and not len(self._sequence):
            raise DataError(f"{what} brings no tasks")

    @property
    def total(self) -> int | None:
        return None if self._sequence is None else len(self._sequence)

    def at(self, draw: int) -> Task | None:
        """The task of a draw; None when the stream has ended."""
        if self._sequence is None:
            for task in itertools.islice(self._stream, max(0, draw + 1 - self._read)):
                self._seen[self._read] = task
                self._read += 1
            return self._seen.get(draw)
        return self._sequence[self._index(draw)]

    def _index(self, position: int) -> int:
        """Which task stands at a position of the passes, counted over all of them."""
        assert self._sequence is not None
        round_, place = divmod(position, len(self._sequence))
        return int(self._order(round_)[place]) if self._shuffle else place

    def note(self, draw: int, scores: Sequence[float]) -> None:
        """Nothing is learned of the tasks."""

    def forget(self, alive: Collection[int]) -> None:
        """No other draws than these will be asked for again, new ones left aside."""
        self._seen = {draw: task for draw, task in self._seen.items() if draw in alive}

    def state(self) -> dict[str, Any] | None:
        """The number of draws says all."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """There is nothing to go on from."""

    def _order(self, round_: int) -> np.ndarray:
        if round_ not in self._orders:
            assert self._sequence is not None
            generator = np.random.default_rng(derive(self._seed, "tasks", round_))
            self._orders = {round_: generator.permutation(len(self._sequence))}
        return self._orders[round_]
