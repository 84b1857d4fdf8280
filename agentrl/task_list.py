"""Tasks that are made, or fetched, when they are looked at."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from .env import Task
from .errors import AgentRLError

T = TypeVar("T")
_may_wait: ContextVar[bool] = ContextVar("may_wait", default=True)


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


class NotReadYet(AgentRLError):
    """Raised in place of waiting, inside `without_waiting()`. After `await read()` the same question has an answer."""

    def __init__(self, what: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(f"{what} is not read yet")
        self.what = what
        self.read = read


@contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, tasks that come from elsewhere raise NotReadYet; an event loop asks for tasks in this way alone."""
    before = _may_wait.set(False)
    try:
        yield
    finally:
        _may_wait.reset(before)


def read_now(what: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Read what is missing, for who may wait. Raises NotReadYet for who may not."""
    if not _may_wait.get():
        raise NotReadYet(what, read)
    run_here(read)


def run_here(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What a coroutine gives, also to code that is called under a running event loop, which then waits."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(start())).result()
