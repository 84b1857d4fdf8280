"""Tasks that are made when they are looked at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from .env import Task


class TaskList(Sequence[Task]):
    """A split of known size, in a fixed order. A subclass has `__len__` and `at`; indices and slices are those of a list."""

    @abstractmethod
    def at(self, position: int) -> Task:
        """The task at 0 <= position < len(self), the same every time."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.at(position) for position in range(len(self))[index]]
        return self.at(range(len(self))[index])
