"""Running a user's environment safely: one env, one episode, one thread, and a bound on every call."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .errors import AgentRLError, EnvError
from .registry import is_async_env


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
            except BaseException as raised:  # the caller's future carries it, SystemExit of user code included
                outcome, error = None, raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, outcome, error)

    def post(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call behind the others; the future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._calls.put((call, loop, future))
        return future

    async def run(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Raises TimeoutError, and abandons the thread, when the call does not return in time."""
        try:
            return await asyncio.wait_for(self.post(call), timeout_s)
        except TimeoutError:
            self.abandoned = True
            raise

    def end(self) -> None:
        """Let the thread finish once its queue is empty."""
        self._calls.put(None)


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error if isinstance(error, Exception) else EnvError(f"{type(error).__name__}: {error}"))


class EnvSession:
    """One env from constructor to close, as an async context manager.

    A sync env lives on a thread of its own: constructor, reset, step and close all run there. Whatever the env raises
    comes out as EnvError. Leaving the context closes the env at most once, exactly once unless a call never returns;
    `close_error` holds what close raised, `abandoned` says that a call never came back.
    """

    def __init__(self, factory: Callable[[], Any], call_timeout_s: float, name: str = "env") -> None:
        self._factory = factory
        self._timeout = call_timeout_s
        self.name = name
        self._thread: EnvThread | None = None
        self._env: Any = None
        self._async = False
        self.close_error: EnvError | None = None
        self._pending: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> EnvSession:
        self._thread = EnvThread(self.name)
        try:
            self._env = await self._guard("constructor", self._thread.run(self._make, self._timeout))
        except BaseException:
            self._thread.post(self._close_if_made).add_done_callback(_forget)
            self._thread.end()
            raise
        return self

    def _close_if_made(self) -> None:
        if self._env is not None and not self._async:
            self._env.close()

    def _make(self) -> Any:
        env = self._factory()
        self._env = env
        self._async = is_async_env(env)
        return env

    @property
    def abandoned(self) -> bool:
        return self._thread is not None and self._thread.abandoned

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute of the env, also through gymnasium's wrappers."""
        env = self._env
        if hasattr(env, "get_wrapper_attr"):
            return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default
        return getattr(env, name) if hasattr(env, name) else default

    async def reset(self, seed: int, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """-> (observation, info), its shape checked."""
        result = await self._call("reset", seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EnvError(f"{self.name}.reset must return (observation, info dict), got {_shown(result)}")
        return result

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """-> (observation, reward, terminated, truncated, info), its shape checked."""
        result = await self._call("step", action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise EnvError(
                f"{self.name}.step must return (observation, reward, terminated, truncated, info dict), got {_shown(result)}"
            )
        return result

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self._thread is not None
        bound = getattr(self._env, method)
        if self._async and inspect.iscoroutinefunction(inspect.unwrap(bound)):
            return await self._guard(method, asyncio.wait_for(bound(*args, **kwargs), self._timeout))
        return await self._guard(method, self._thread.run(lambda: bound(*args, **kwargs), self._timeout))

    async def _guard(self, what: str, call: Any) -> Any:
        """The fault boundary of user code: every error becomes EnvError with its cause, cancellation passes."""
        try:
            return await call
        except TimeoutError as error:
            raise EnvError(f"{self.name}: {what} took longer than {self._timeout:g} s") from error
        except AgentRLError:
            raise
        except Exception as error:
            raise EnvError(f"{self.name}: {what} raised {type(error).__name__}: {error}") from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        try:
            if self._thread.abandoned:
                self._thread.post(self._env.close).add_done_callback(_forget)
            else:
                await self._call("close")
        except EnvError as raised:
            self.close_error = raised
        finally:
            self._thread.end()


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _shown(value: Any) -> str:
    return repr(value)[:120]
