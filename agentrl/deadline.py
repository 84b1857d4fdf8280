"""A bound on awaited code, as `asyncio.timeout` gives it, at a third of its cost: calls with the same bound share one timer."""

from __future__ import annotations

import asyncio
import math
import threading


class Deadline:
    """From its making to `end`, the running task has `bound_s` seconds; then it is cancelled.

    `expired` says that this happened; then `end` takes the cancellation back, and is True where nobody else asked for it.
    """

    __slots__ = ("_cancelling", "_queue", "_task", "expired", "when")

    def __init__(self, bound_s: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "a deadline holds for a task"
        self._task = task
        self._cancelling = task.cancelling()
        self.expired = False
        self.when = loop.time() + bound_s
        self._queue = _here.deadlines(loop, bound_s)
        self._queue.add(self)

    def expire(self) -> None:
        """The time is up."""
        self.expired = True
        self._task.cancel()

    def end(self) -> bool:
        """Whether the task was cancelled because time was up, and for no other reason. To be asked once."""
        self._queue.drop(self)
        return self.expired and self._task.uncancel() <= self._cancelling


class _Deadlines:
    """What has the same bound on one event loop, and so ends in the order in which it began. One timer, for the first."""

    def __init__(self, bound_s: float) -> None:
        self._bound = bound_s
        self._open: dict[Deadline, None] = {}
        self._set = math.isinf(bound_s)

    def add(self, deadline: Deadline) -> None:
        self._open[deadline] = None
        if not self._set:
            self._wait_for(deadline)

    def drop(self, deadline: Deadline) -> None:
        self._open.pop(deadline, None)

    def _wait_for(self, first: Deadline) -> None:
        self._set = True
        asyncio.get_running_loop().call_at(first.when, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._open:
            first = next(iter(self._open))
            if first.when > now:
                return self._wait_for(first)
            del self._open[first]
            first.expire()
        self._set = False
        _here.by_bound.pop(self._bound, None)


class _Here(threading.local):
    """The deadlines of this thread's event loop, by their bound."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.by_bound: dict[float, _Deadlines] = {}

    def deadlines(self, loop: asyncio.AbstractEventLoop, bound_s: float) -> _Deadlines:
        if self.loop is not loop:
            self.loop, self.by_bound = loop, {}
        found = self.by_bound.get(bound_s)
        if found is None:
            found = self.by_bound[bound_s] = _Deadlines(bound_s)
        return found


_here = _Here()
