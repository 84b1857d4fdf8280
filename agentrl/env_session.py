"""Running a user's environment safely: one env, one episode, one thread, and a bound on every call."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import reprlib
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from .errors import AgentRLError, EnvError

CANCELLED_CLOSE_S = 10.0
"""How long a cancelled episode waits for its env to close; the close itself stays queued."""


class CallTimeoutError(Exception):
    """A call did not return in time. (A TimeoutError is something that user code may raise itself.)"""


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
        future.add_done_callback(_forget)
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


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def run_async(start: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
    """Await user code on the event loop. Raises CallRaisedError or CallTimeoutError; our own cancellation passes."""
    scope = asyncio.timeout(timeout_s)
    try:
        coming: Any = start()
        if inspect.iscoroutine(coming):
            try:
                coming = _Begun(coming, coming.send(None))
            except StopIteration as done:  # it waited for nothing, so there is nothing to bound
                return done.value
        async with scope:
            return await coming
    except TimeoutError as error:
        if scope.expired():
            raise CallTimeoutError from error
        raise CallRaisedError(error) from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise CallRaisedError(error) from error
    except GeneratorExit:  # this coroutine is being closed
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code would end the event loop
        raise CallRaisedError(error) from error


class _Begun:
    """The rest of a coroutine that has run, in this task, up to its first wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], first: Any) -> None:
        self.coroutine = coroutine
        self.first = first

    def __await__(self) -> Generator[Any, Any, Any]:
        waiting = self.first
        try:
            while True:
                try:
                    sent = yield waiting
                except Exception as error:
                    waiting = self.coroutine.throw(error)
                except asyncio.CancelledError as error:
                    waiting = self.coroutine.throw(error)
                else:
                    waiting = self.coroutine.send(sent)
        except StopIteration as done:
            return done.value
        finally:
            self.coroutine.close()


def is_cancelled() -> bool:
    """Whether somebody cancelled the running task: else a CancelledError is user code's own, from a task inside it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def blame_env(what: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """The fault boundary of user code: what it raises comes out as EnvError, errors of agentrl's classes as they are."""
    try:
        return await call
    except CallTimeoutError as error:
        raise EnvError(f"{what} took longer than {timeout_s:g} s") from error
    except CallRaisedError as error:
        if isinstance(error.__cause__, AgentRLError):
            raise error.__cause__ from error.__cause__.__cause__
        raise EnvError(f"{what} raised {error}") from error.__cause__


class EnvSession:
    """One env from constructor to close, as an async context manager.

    A sync env lives on a thread of its own: constructor, reset, step and close all run there. Async methods run on the
    event loop; the constructor of an async env runs on the thread too, so whatever needs a running loop belongs in reset.
    Whatever the env raises comes out as EnvError. Leaving the context closes the env at most once, exactly once unless a
    call never returns; `close_error` holds what close raised, `abandoned` says that a call never came back.
    """

    def __init__(self, factory: Callable[[], Any], call_timeout_s: float, name: str = "env") -> None:
        self._factory = factory
        self._timeout = call_timeout_s
        self.name = name
        self._thread: EnvThread | None = None
        self._env: Any = None
        self._coroutines: dict[str, bool] = {}
        self.close_error: AgentRLError | None = None

    async def __aenter__(self) -> EnvSession:
        self._thread = EnvThread(self.name)
        try:
            await self.run("constructor", self._make)
        except BaseException:
            self._thread.post(self._close_here)
            self._thread.end()
            raise
        return self

    def _make(self) -> None:
        self._env = self._factory()
        if not (hasattr(self._env, "reset") and hasattr(self._env, "step")):
            raise EnvError(f"{self.name}: {reprlib.repr(self._env)} is no environment: it has no reset and step")

    def _close_here(self) -> None:
        """Close on the env's thread, an `async def close` included, where nobody waits for it."""
        if hasattr(self._env, "close"):
            outcome = self._env.close()
            if inspect.isawaitable(outcome):
                asyncio.run(_awaited(outcome))

    @property
    def abandoned(self) -> bool:
        return self._thread is not None and self._thread.abandoned

    @property
    def lost(self) -> bool:
        """Whether a call that never returned still holds the thread."""
        return self._thread is not None and self._thread.lost

    async def run(self, what: str, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Any call on the env's thread, under the same bound and fault boundary as the env's methods."""
        assert self._thread is not None
        timeout = self._timeout if timeout_s is None else timeout_s
        return await blame_env(f"{self.name}: {what}", self._thread.run(call, timeout), timeout)

    async def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the env, also through gymnasium's wrappers."""
        return await self.run(name, lambda: _attribute(self._env, name, default))

    async def reset(self, seed: int | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """-> (observation, info), its shape checked."""
        result = await self._call("reset", seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EnvError(f"{self.name}.reset must return (observation, info dict), got {reprlib.repr(result)}")
        return result

    async def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """-> (observation, reward, terminated, truncated, info), its shape checked."""
        result = await self._call("step", action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise EnvError(
                f"{self.name}.step must return (observation, reward, terminated, truncated, info dict), "
                f"got {reprlib.repr(result)}"
            )
        return result

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Async methods on the event loop, sync ones on the thread; what a sync one returns to await is awaited."""
        timeout = self._timeout if timeout_s is None else timeout_s
        if not self._is_coroutine(method):
            outcome = await self.run(method, lambda: getattr(self._env, method)(*args, **kwargs), timeout)
            if not inspect.isawaitable(outcome):
                return outcome
            coming = run_async(lambda: outcome, timeout)
        else:
            coming = run_async(lambda: getattr(self._env, method)(*args, **kwargs), timeout)
        return await blame_env(f"{self.name}: {method}", coming, timeout)

    def _is_coroutine(self, method: str) -> bool:
        if method not in self._coroutines:
            self._coroutines[method] = inspect.iscoroutinefunction(inspect.unwrap(getattr(self._env, method)))
        return self._coroutines[method]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        cancelled = kind is not None and not issubclass(kind, Exception)
        try:
            if not hasattr(self._env, "close"):
                return
            if self._thread.abandoned and not self._is_coroutine("close"):
                self._thread.post(self._close_here)
            else:
                await self._call("close", timeout_s=min(self._timeout, CANCELLED_CLOSE_S) if cancelled else None)
        except AgentRLError as raised:
            self.close_error = raised
        finally:
            self._thread.end()


def _attribute(env: Any, name: str, default: Any) -> Any:
    if hasattr(env, "get_wrapper_attr"):
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default
    return getattr(env, name) if hasattr(env, name) else default


async def _awaited(outcome: Awaitable[Any]) -> Any:
    return await outcome
