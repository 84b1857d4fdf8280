"""Running a user's environment safely: one env, one episode, one thread, and a bound on every call."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any

from .backoff import pauses
from .env_calls import BlockingCallError, CallRaisedError, CallTimeoutError, EnvThread, blame_env, blamed, run_async
from .env_loop import EnvLoop, EnvLoops
from .errors import AgentRLError, BusyError, EnvError

CANCELLED_CLOSE_S = 10.0
"""How long a cancelled episode waits for its env to close; the close itself stays queued."""

BUSY_PAUSE_S = 0.25
"""The first wait for an env without a free place; they grow."""


class EnvSession:
    """One env from constructor to close, as an async context manager.

    A sync env lives on a thread of its own: constructor, reset, step and close all run there. Async methods run on
    one of `loops`, without them on the running event loop; the constructor of an async env runs on the thread too, so
    whatever needs a running loop belongs in reset.
    Whatever the env raises comes out as EnvError. Leaving the context closes the env at most once, exactly once unless a
    call never returns; `close_error` holds what close raised, `abandoned` says that a call never came back.
    """

    def __init__(
        self, factory: Callable[[], Any], call_timeout_s: float, name: str = "env", loops: EnvLoops | None = None
    ) -> None:
        self._factory = factory
        self._timeout = call_timeout_s
        self.name = name
        self._loops = loops
        self._loop: EnvLoop | None = None
        self._blocks = False
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
        left = self._thread is not None and self._thread.abandoned
        return self._blocks or left or bool(getattr(self._env, "abandoned_calls", 0))

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

    async def reset(
        self, seed: int | None, options: dict[str, Any], busy_s: float = math.inf
    ) -> tuple[Any, dict[str, Any]]:
        """-> (observation, info), its shape checked. An env without a free place is asked again for `busy_s`, each call under
        the bound of a call: an episode has a bound of its own.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + busy_s
        for pause in pauses(BUSY_PAUSE_S):
            try:
                result = await self._call("reset", seed=seed, options=options)
                break
            except BusyError:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(pause)
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
            start = partial(_awaited, outcome)
        else:
            start = partial(getattr(self._env, method), *args, **kwargs)
        try:
            return await (run_async if self._loops is None else self._run_on)(start, timeout)
        except (CallTimeoutError, CallRaisedError) as error:
            failure = blamed(f"{self.name}: {method}", error, timeout)
        raise failure

    async def _run_on(self, start: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        """On one of the loops."""
        assert self._loops is not None
        self._loop = self._loop or self._loops.current()
        try:
            return await self._loop.run(start, timeout_s)
        except BlockingCallError:
            self._blocks = True
            raise

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
            elif self._loop is not None and self._loop.blocked and self._is_coroutine("close"):
                self._loop.post(self._env.close)
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
