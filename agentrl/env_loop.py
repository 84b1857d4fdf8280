"""The event loop of a worker's async environments: on a thread of its own, apart from the loop that serves the engines.

They share one loop, as they may share clients and locks. Code that blocks it (`time.sleep` in `async def step`) then holds
up other environments, and not the worker; whose code it is can be told, so that one alone is blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from .env_calls import BlockingCallError, CallTimeoutError, forget, run_async
from .errors import InfrastructureError

GRACE_S = 2.0
"""How long a cancelled call may still clean up, and a loop may take to answer."""


class EnvLoops:
    """Gives every new environment a loop that is not blocked; a thread starts when the first one needs it."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace = grace_s
        self._loop: EnvLoop | None = None

    def current(self) -> EnvLoop:
        """The loop for an environment's whole life."""
        if self._loop is None or self._loop.blocked:
            self._loop = EnvLoop(self._grace)
        return self._loop


class EnvLoop:
    """One loop on one daemon thread. `blocked` = it gave no answer when it was asked: no other environment begins on it."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace = grace_s
        self._loop = asyncio.new_event_loop()
        self.blocked = False
        threading.Thread(target=self._loop.run_forever, name="agentrl-env-loop", daemon=True).start()

    async def run(self, start: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        """`run_async` over there. Raises what that raises; CallTimeoutError also for code that goes on though it was
        cancelled, BlockingCallError for code that holds the loop, InfrastructureError when other code holds it.
        """
        call = _Call(start, timeout_s)
        done = self.post(call.run)
        try:
            ended, _ = await asyncio.wait({done}, timeout=timeout_s + self._grace)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(call.cancel)
            await asyncio.wait({done}, timeout=self._grace)
            raise
        if ended:
            return done.result()
        await self._blame(call)

    def post(self, start: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        """Begin a call when the loop comes to it; the future belongs to the running loop."""
        done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(start), self._loop))
        done.add_done_callback(forget)
        return done

    async def _blame(self, call: _Call) -> None:
        holder = asyncio.current_task(self._loop)
        self.blocked = not await self._answers()
        if not self.blocked:
            self._loop.call_soon_threadsafe(call.cancel)
            raise CallTimeoutError
        if call.task is not None and holder is call.task:
            raise BlockingCallError
        raise InfrastructureError("code of another environment blocks the event loop of the async environments")

    async def _answers(self) -> bool:
        here, answer = asyncio.get_running_loop(), asyncio.Event()
        self._loop.call_soon_threadsafe(here.call_soon_threadsafe, answer.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer.wait(), self._grace)
        return answer.is_set()


class _Call:
    """A call and, once it runs, its task."""

    def __init__(self, start: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
        self._start = start
        self._timeout = timeout_s
        self.task: asyncio.Task[Any] | None = None

    async def run(self) -> Any:
        self.task = asyncio.current_task()
        return await run_async(self._start, self._timeout)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


async def _awaited(start: Callable[[], Awaitable[Any]]) -> Any:
    return await start()
