"""`sync(env)`: a gymnasium environment over one whose methods are `async def`."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium

from .registry import is_async_env

CLOSE_TIMEOUT_S = 10.0


def sync(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """A view of `env` with plain `reset`, `step` and `close`; an env without async methods is returned as it is.

    May be used anywhere, also under a running event loop, whose thread then waits. Raises TypeError for a gymnasium
    wrapper over an async env: wrap the sync view instead.
    """
    if is_async_env(env) or inspect.iscoroutinefunction(env.close):
        return SyncView(env)
    if isinstance(env, gymnasium.Wrapper) and not isinstance(env, SyncView):
        _refuse_wrapped_async(env)
    return env


def _refuse_wrapped_async(env: gymnasium.Wrapper[Any, Any, Any, Any]) -> None:
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper) and not isinstance(inner, SyncView):
        inner = inner.env
    if is_async_env(inner):
        name, wrapper = type(inner).__name__, type(env).__name__
        raise TypeError(
            f"{wrapper} cannot wrap the async {name}: wrap its sync view, {wrapper}(agentrl.sync({name}(…)))"
        )


class SyncView(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Every call runs on one event loop, on one thread that is the env's own, in the order of the calls.

    `close` ends the loop and may be called again; after it `reset` and `step` raise RuntimeError.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="agentrl-sync", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result: tuple[Any, dict[str, Any]] = self._call(self.env.reset, seed=seed, options=options)
        return result

    def step(self, action: Any) -> Any:
        return self._call(self.env.step, action)

    def close(self) -> None:
        if not self._finalizer.alive:
            return
        try:
            self._call(self.env.close)
        finally:
            self._finalizer()
            self._thread.join(CLOSE_TIMEOUT_S)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._finalizer.alive:
            raise RuntimeError(f"{type(self.env).__name__} is closed")
        pending = asyncio.run_coroutine_threadsafe(_awaited(method, *args, **kwargs), self._loop)
        try:
            return pending.result()
        finally:
            pending.cancel()


async def _awaited(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end what the env left running."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
