"""A bound on awaited code, as `asyncio.timeout` gives it, at a third of its cost: calls with the same bound share one timer."""

from __future__ import annotations

import asyncio
import math
import threading


class Deadline:
    """From its making to `end`, the running task has `bound_s` seconds; then it is cancelled.

    `expired` says that this happened; then `end` takes the cancellation back, and is True where nobody else asked for it.
    """

    __slots__ = ("_cancelling", "_open", "_task", "expired", "when")

    def __init__(self, bound_s: float) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "a deadline holds for a task"
        self._task = task
        self._cancelling = task.cancelling()
        self.expired = False
        self.when = loop.time() + bound_s
        if _here.loop is not loop:
            _here.loop, _here.by_bound = loop, {}
        queue = _here.by_bound.get(bound_s)
        if queue is None:
            queue = _here.by_bound[bound_s] = _Deadlines(bound_s)
        self._open = queue.open
        self._open[self] = None
        if not queue.waits:
            queue.wait_for(self)

    def expire(self) -> None:
        """The time is up."""
        self.expired = True
        self._task.cancel()

    def end(self) -> bool:
        """Whether the task was cancelled because time was up, and for no other reason. To be asked once."""
        self._open.pop(self, None)
        return self.expired and self._task.uncancel() <= self._cancelling


class _Deadlines:
    """What has the same bound on one event loop, and so ends in the order in which it began. One timer, for the first; `waits` =
    it is set, or never needed.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound = bound_s
        self.open: dict[Deadline, None] = {}
        self.waits = math.isinf(bound_s)

    def wait_for(self, first: Deadline) -> None:
        self.waits = True
        asyncio.get_running_loop().call_at(first.when, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.open:
            first = next(iter(self.open))
            if first.when > now:
                return self.wait_for(first)
            del self.open[first]
            first.expire()
        self.waits = False
        _here.by_bound.pop(self._bound, None)


class _Here(threading.local):
    """The deadlines of this thread's event loop, by their bound."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.by_bound: dict[float, _Deadlines] = {}


_here = _Here()
