"""Async environments on a loop of their own: one that blocks it costs its own episode, the others are played again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agentrl import Env, EnvError, InfrastructureError
from agentrl.env_calls import BlockingCallError, CallRaisedError, CallTimeoutError
from agentrl.env_loop import EnvLoop, EnvLoops
from agentrl.env_session import EnvSession


@pytest.fixture
async def released() -> AsyncIterator[threading.Event]:
    """Ends what blocks a loop when the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_runs_on_the_loops_own_thread() -> None:
    loop = EnvLoop()

    async def where() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    assert await loop.run(where, 5.0) == await loop.run(where, 5.0) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_it_raises_comes_back_and_the_loop_goes_on(error: BaseException) -> None:
    loop = EnvLoop()

    async def fails() -> None:
        raise error

    with pytest.raises(CallRaisedError) as caught:
        await loop.run(fails, 5.0)
    assert caught.value.__cause__ is error
    assert await loop.run(lambda: asyncio.sleep(0, "alive"), 5.0) == "alive"


async def test_code_that_goes_on_though_cancelled_is_left_and_the_loop_serves_others() -> None:
    loop, ended = EnvLoop(grace_s=0.2), threading.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    with pytest.raises(CallTimeoutError) as caught:
        await loop.run(stubborn, 0.1)
    assert not isinstance(caught.value, BlockingCallError) and not loop.blocked
    assert await loop.run(lambda: asyncio.sleep(0, "alive"), 5.0) == "alive"
    ended.set()


async def test_a_cancelled_caller_cancels_the_call_and_waits_for_its_end() -> None:
    loop, begun = EnvLoop(), threading.Event()
    log: list[str] = []

    async def cleans_up() -> None:
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            log.append("cleaned up")

    caller = asyncio.create_task(loop.run(cleans_up, 60.0))
    assert await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert log == ["cleaned up"]


async def test_the_one_that_blocks_is_blamed_and_the_others_are_lost_as_infrastructure(
    released: threading.Event,
) -> None:
    loops = EnvLoops(grace_s=0.3)
    loop = loops.current()

    async def blocks() -> None:
        await asyncio.sleep(0.05)
        released.wait(30)

    async def waits() -> None:
        await asyncio.sleep(0.1)

    began = time.monotonic()
    blocker, *others = await asyncio.gather(
        loop.run(blocks, 0.2), loop.run(waits, 0.2), loop.run(waits, 0.3), return_exceptions=True
    )
    assert isinstance(blocker, BlockingCallError)
    assert [type(other) for other in others] == [InfrastructureError, InfrastructureError]
    assert loop.blocked and loops.current() is not loop
    assert await loops.current().run(lambda: asyncio.sleep(0, "alive"), 5.0) == "alive"
    assert time.monotonic() - began < 20, "nobody waited for the end of the block"


def env_of(step: Callable[[], Awaitable[None]], closed: list[str]) -> type[Env]:
    class Mine(Env):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "go", {}

        async def step(self, action: Any) -> Any:
            await step()
            return "", 1.0, True, False, {}

        async def close(self) -> None:
            closed.append("closed")

    return Mine


async def test_a_session_names_the_env_and_closes_it_once_the_block_is_over(released: threading.Event) -> None:
    closed: list[str] = []

    async def blocks() -> None:
        released.wait(30)

    loops = EnvLoops(grace_s=0.2)
    session = EnvSession(env_of(blocks, closed), 0.2, "stuck", loops)
    with pytest.raises(EnvError, match=r"stuck: step blocked the event loop for longer than 0\.2 s"):
        async with session as env:
            await env.reset(0, {})
            await env.step("x")
    assert session.abandoned and closed == []
    async with EnvSession(env_of(lambda: asyncio.sleep(0), closed), 5.0, "well", loops) as env:
        await env.reset(0, {})
        assert (await env.step("x"))[1] == 1.0
    assert closed == ["closed"]
    released.set()
    for _ in range(100):
        if len(closed) == 2:
            break
        await asyncio.sleep(0.02)
    assert closed == ["closed", "closed"]
