"""Calls of user code under a bound: sync code on a thread of its own, async code on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from .deadline import Deadline
from .errors import AgentRLError, EnvError


class CallTimeoutError(Exception):
    """A call did not return in time. (A TimeoutError is something that user code may raise itself.)"""


class BlockingCallError(CallTimeoutError):
    """An async call that did not return in time, and let nothing else run meanwhile."""


class CallRaisedError(Exception):
    """A call raised; the error, of any class, is the `__cause__`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("".join(traceback.format_exception_only(error)).strip())
        self.__cause__ = error


class EnvThread:
    """One daemon thread that runs calls in order. A call over its time is abandoned with the thread it blocks."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.abandoned = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for call, loop, future in iter(self._calls.get, None):
            try:
                outcome, error = call(), None
            except BaseException as raised:  # the caller is told, of SystemExit in user code too
                outcome, error = None, CallRaisedError(raised)
            with contextlib.suppress(RuntimeError):  # the loop that asked is closed
                loop.call_soon_threadsafe(_settle, future, outcome, error)

    def post(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call behind the others; the future belongs to the running loop and raises CallRaisedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        future.add_done_callback(forget)
        self._calls.put((call, loop, future))
        return future

    async def run(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Raises CallRaisedError, or CallTimeoutError and abandons the thread when the call does not return in time."""
        future = self.post(call)
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            self.abandoned = True
            raise CallTimeoutError
        return future.result()

    @property
    def lost(self) -> bool:
        """Abandoned, and still held by the call that did not return."""
        return self.abandoned and self._thread.is_alive()

    def end(self) -> None:
        """Let the thread finish once its queue is empty."""
        self._calls.put(None)


def _settle(future: asyncio.Future[Any], outcome: Any, error: CallRaisedError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)


def forget(future: asyncio.Future[Any]) -> None:
    """Done callback: an error that nobody asks for is not reported."""
    if not future.cancelled():
        future.exception()


async def run_async(start: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
    """Await user code on the event loop. Raises CallRaisedError or CallTimeoutError; our own cancellation passes."""
    deadline = Deadline(timeout_s)
    late = False
    try:
        try:
            return await start()
        finally:
            late = deadline.end()
    except TimeoutError as error:
        if deadline.expired:
            raise CallTimeoutError from error
        raise CallRaisedError(error) from error
    except asyncio.CancelledError as error:
        if late:
            raise CallTimeoutError from error
        if is_cancelled():
            raise
        raise CallRaisedError(error) from error
    except GeneratorExit:  # this coroutine is being closed
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code would end the event loop
        raise CallRaisedError(error) from error


def is_cancelled() -> bool:
    """Whether somebody cancelled the running task: else a CancelledError is user code's own, from a task inside it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def blame_env(what: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """The fault boundary of user code: what it raises comes out as EnvError, errors of agentrl's classes as they are."""
    try:
        return await call
    except (CallTimeoutError, CallRaisedError) as error:
        failure = blamed(what, error, timeout_s)
    raise failure  # out here it keeps the context that it was raised in


def blamed(what: str, error: CallTimeoutError | CallRaisedError, timeout_s: float) -> AgentRLError:
    """What is raised in place of a call's error, with its cause."""
    if isinstance(error, CallRaisedError):
        if isinstance(error.__cause__, AgentRLError):
            return error.__cause__
        raised = EnvError(f"{what} raised {error}")
        raised.__cause__ = error.__cause__
        return raised
    if isinstance(error, BlockingCallError):
        said = f"{what} blocked the event loop for longer than {timeout_s:g} s: async code must await what takes time"
    else:
        said = f"{what} took longer than {timeout_s:g} s"
    late = EnvError(said)
    late.__cause__ = error
    return late
