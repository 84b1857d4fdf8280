"""The tasks that an environment brings: the fault boundary of the code they come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .env import Task
from .errors import AgentRLError, ConfigError
from .task_list import TaskList

END = object()


def checked_tasks(tasks: Any, what: str) -> Iterable[Task]:
    """The same tasks, a Sequence where they are one. What reading them raises, and what is no Task, is a ConfigError."""
    if isinstance(tasks, Sequence):
        return CheckedTasks(tasks, what)
    if not isinstance(tasks, Iterable):
        raise ConfigError(f"{what} gave {type(tasks).__name__}, no collection of tasks.")
    return CheckedStream(tasks, what)


class CheckedTasks(TaskList):
    """A Sequence of tasks, looked at one by one."""

    def __init__(self, tasks: Sequence[Any], what: str) -> None:
        self._tasks = tasks
        self._what = what

    def __len__(self) -> int:
        with fault(self._what):
            return len(self._tasks)

    def at(self, position: int) -> Task:
        with fault(f"{self._what}[{position}]"):
            return _checked(self._tasks[position], self._what)


class CheckedStream(Iterator[Task]):
    """Tasks read once, looked at one by one; reading goes on after an error that is not the end."""

    def __init__(self, tasks: Iterable[Any], what: str) -> None:
        with fault(what):
            self._tasks = iter(tasks)
        self._what = what
        self._position = 0

    def __next__(self) -> Task:
        with fault(f"{self._what}, at task {self._position},"):
            task = next(self._tasks, END)
        if task is END:
            raise StopIteration
        self._position += 1
        return _checked(task, self._what)


def _checked(task: Any, what: str) -> Task:
    if not isinstance(task, Task):
        raise ConfigError(f"{what} gave a {type(task).__name__} ({task!r:.60}): every task must be an agentrl.Task.")
    return task


@contextmanager
def fault(what: str) -> Iterator[None]:
    """What user code raises inside comes out as ConfigError; errors of agentrl's classes as they are."""
    try:
        yield
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error


def seed_tasks(split: str) -> Iterator[Task]:
    """For an env that brings no tasks: every draw is one, without an end, and the seed that the env gets is all it differs
    by.
    """
    return (Task(id=f"{split}-{number}") for number in itertools.count())
