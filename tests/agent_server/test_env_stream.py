"""Who plays a step of the stream: the task that read it or one of its own, which nobody may notice."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl.agent_server.env_service import EnvLimits
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Env

from .serving import Caller, Counting, Stream, serving, until

HELD = contextvars.ContextVar("held", default="nothing")


class Moody(Env):
    """Answers at once or takes its time, as the action says, and counts its steps."""

    max_turns = 1000
    let_go = asyncio.Event()
    cancelled = 0
    held: list[asyncio.Task[Any]] = []

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        self.steps = 0
        return "begin", {}

    async def step(self, action: Any) -> Any:
        said = str(action)
        try:
            async with asyncio.timeout(0.05 if said == "times out" else 30):
                if said == "wait":
                    await asyncio.sleep(0.01)
                elif said == "times out":
                    await asyncio.sleep(60)
                elif said == "hold":
                    task = asyncio.current_task()
                    assert task is not None
                    self.held.append(task)
                    await type(self).let_go.wait()
                elif said == "yield":
                    await asyncio.sleep(0)
        except TimeoutError:
            said = "timed out"
        except asyncio.CancelledError:
            type(self).cancelled += 1
            raise
        if said == "set":
            HELD.set("something")
        self.steps += 1
        return f"{self.steps}: {said}, {HELD.get()}", 1.0, False, False, {}


@pytest.fixture
async def server() -> AsyncIterator[Caller]:
    Moody.let_go, Moody.cancelled, Moody.held = asyncio.Event(), 0, []
    async with serving(EnvLimits(call_timeout_s=20), envs={"moody": Moody, "counting": Counting}) as caller:
        yield caller


async def begun(stream: Stream, n: int, env: str = "moody") -> list[str]:
    return [(await stream.ask("create", env=env))["session_id"] for _ in range(n)]


WIDEST = 12
ACTIONS = st.sampled_from(["now", "now", "now", "wait", "yield", "times out"])


async def answered(server: Caller, bursts: list[list[str]]) -> None:
    """Every step of every burst, once, whatever the others of its burst do."""
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        sessions = await begun(stream, WIDEST)
        taken = dict.fromkeys(sessions, 0)
        for burst in bursts:
            expected = {}
            for session, action in zip(sessions, burst, strict=False):
                number = await stream.send("step", session_id=session, index=taken[session], action=action)
                taken[session] += 1
                said = "timed out" if action == "times out" else action
                expected[number] = f"{taken[session]}: {said}, nothing"
            replies = [await stream.receive() for _ in expected]
            assert {reply["id"]: reply.get("observation", reply) for reply in replies} == expected
        for session in sessions:
            assert (await stream.ask("close", session_id=session))["status"] == 200


def test_every_step_of_every_burst_is_answered_once() -> None:
    @given(st.lists(st.lists(ACTIONS, min_size=1, max_size=WIDEST), min_size=1, max_size=5))
    @settings(max_examples=40, deadline=None)
    def check(bursts: list[list[str]]) -> None:
        runner.run(answered(server, bursts))

    with asyncio.Runner() as runner:
        context = serving(envs={"moody": Moody})
        server = runner.run(context.__aenter__())
        check()
        runner.run(context.__aexit__(None, None, None))


async def test_a_step_that_takes_time_holds_up_nobody(server: Caller) -> None:
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        held, free = await begun(stream, 2)
        first = await stream.send("step", session_id=held, index=0, action="hold")
        for index in range(3):
            assert (await stream.ask("step", session_id=free, index=index, action="now"))["status"] == 200
        Moody.let_go.set()
        reply = await stream.receive()
        assert (reply["id"], reply["observation"]) == (first, "1: hold, nothing")
        assert (await stream.ask("step", session_id=free, index=3, action="now"))["observation"] == "4: now, nothing"


async def test_a_session_that_is_closed_ends_its_step_and_nothing_else(server: Caller) -> None:
    """The step is played by the connection's own task, which goes on."""
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        for _ in range(3):
            held, free = await begun(stream, 2)
            step = await stream.send("step", session_id=held, index=0, action="hold")
            close = await stream.send("close", session_id=held)
            replies = {reply["id"]: reply["status"] for reply in [await stream.receive() for _ in range(2)]}
            assert replies == {step: 404, close: 200}
            assert (await stream.ask("step", session_id=free, index=0, action="times out"))["observation"] == (
                "1: timed out, nothing"
            )
    assert Moody.cancelled == 3
    assert [task.cancelling() for task in Moody.held] == [0, 0, 0], "what it plays next is not cancelled"


async def test_a_server_that_ends_waits_for_no_step(caplog: pytest.LogCaptureFixture) -> None:
    Moody.let_go, Moody.cancelled, Moody.held = asyncio.Event(), 0, []
    async with serving(EnvLimits(call_timeout_s=20), envs={"moody": Moody}) as server:
        stream = Stream(await server.http.ws_connect("/v1/stream"))
        (held,) = await begun(stream, 1)
        await stream.send("step", session_id=held, index=0, action="hold")
        await until(lambda: Moody.held)
    assert Moody.cancelled == 1
    assert "graceful shutdown exceeded" not in caplog.text


async def test_a_step_outlives_the_connection_whose_task_plays_it(server: Caller) -> None:
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        (held,) = await begun(stream, 1)
        await stream.send("step", session_id=held, index=0, action="hold")
        await stream.ask("heartbeat", session_id=held)
    repeated = asyncio.ensure_future(server.step(held, 0, "hold"))
    await asyncio.sleep(0.05)
    assert not repeated.done()
    Moody.let_go.set()
    assert (await repeated)[1]["observation"] == "1: hold, nothing"
    assert Moody.cancelled == 0


async def test_what_an_env_sets_for_its_task_is_its_own(server: Caller) -> None:
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        one, other = await begun(stream, 2)
        for index in range(3):
            assert (await stream.ask("step", session_id=one, index=index, action="set"))["observation"].endswith(
                "something"
            )
            assert (await stream.ask("step", session_id=other, index=index, action="now"))["observation"].endswith(
                "nothing"
            )


async def test_a_connection_leaves_no_task(server: Caller) -> None:
    before = len(asyncio.all_tasks())
    for action in ("now", "wait", "set"):
        async with server.http.ws_connect("/v1/stream") as socket:
            stream = Stream(socket)
            (session,) = await begun(stream, 1)
            for index in range(3):
                await stream.ask("step", session_id=session, index=index, action=action)
            await stream.ask("close", session_id=session)
    await until(lambda: len(asyncio.all_tasks()) <= before)
