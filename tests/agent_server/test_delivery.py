"""What an agent has not read is not trained, however it went; what it has read is. On asyncio's own event loop, and on
uvloop, which Ray's processes run.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agentrl.agent_server.connection import _ServedConnection

from agentrl import FunctionExecutor, Limits, Reply, ScriptedEngine, Task, Trajectory

from .any_agent import THINK_S, asked_by_hand
from .conftest import Stage

HI = [{"role": "user", "content": "hi"}]
LONG = "a reply of which only the beginning is read " * 6
LIMITS = Limits(max_new_tokens=10**5, max_len=10**6, max_total_tokens=10**6)


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    if request.param == "asyncio":
        return asyncio.DefaultEventLoopPolicy()
    return pytest.importorskip("uvloop").EventLoopPolicy()


async def by_hand(client: Any, header: str = "X: x", **more: Any) -> Any:
    url, body = client.base_url, json.dumps({"messages": HI, **more}).encode()
    return await asked_by_hand(url.host, url.port, client.api_key, body, header)


async def drained(socket: Any) -> bytes:
    """What comes until nothing more does."""
    content = b""
    while not content.endswith((b"\r\n0\r\n\r\n", b"}}")):
        content += await asyncio.get_running_loop().sock_recv(socket, 65536)
    return content


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_broken_off_is_not_trained_and_one_that_is_read_is(stage: Stage, stream: bool) -> None:
    """Also when all of it was sent before, and a reward that was posted meanwhile stays in the rollout."""

    async def run(task: Task, client: Any) -> None:
        with await by_hand(client, stream=stream) as socket:
            await drained(socket)
        with await by_hand(client, stream=stream, user="another") as socket:
            assert len(await asyncio.get_running_loop().sock_recv(socket, 300)) > 100
            await asyncio.sleep(THINK_S)
            await client.post("/rollouts/self/reward", body={"reward": 2.0}, cast_to=object)
        await client.post("/rollouts/self/end", cast_to=object)

    record = await stage.play(run, "read", LONG, limits=LIMITS)
    assert stage.trained(record) == ["read"] and record.metrics["policy/undelivered"] == 1
    assert record.total_reward == 2.0 and [row.rewards.sum() for row in record.rows()] == [2.0]
    assert [message["content"] for message in record.messages if message["role"] == "assistant"] == ["read"]


async def test_who_asks_again_has_read_the_answer_before(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the next request is there before the server has seen that the answer was taken."""
    taken, delays = _ServedConnection.taken, iter([THINK_S, 60.0])

    async def late(connection: _ServedConnection) -> bool:
        await asyncio.sleep(next(delays))
        return await taken(connection)

    async def run(task: Task, client: Any) -> None:
        loop = asyncio.get_running_loop()
        with await by_hand(client) as socket:
            await drained(socket)
            body = json.dumps({"messages": HI, "user": "another"}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
            await loop.sock_sendall(socket, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await loop.sock_recv(socket, 300)
            await asyncio.sleep(2 * THINK_S)
        await client.post("/rollouts/self/end", cast_to=object)

    monkeypatch.setattr(_ServedConnection, "taken", late)
    record = await stage.play(run, "read", LONG, limits=LIMITS)
    assert stage.trained(record) == ["read"] and record.metrics["policy/undelivered"] == 1


async def test_an_answer_that_was_repeated_by_the_agent_stays_trained(stage: Stage) -> None:
    async def run(task: Task, client: Any) -> None:
        with await by_hand(client, stream=True) as socket:
            await asyncio.get_running_loop().sock_recv(socket, 300)
            await asyncio.sleep(THINK_S)
            said = {"role": "assistant", "content": "one"}
            await client.chat.completions.create(model="m", messages=[*HI, said, *HI])

    assert stage.trained(await stage.play(run, "one", "two")) == ["one|two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_of_which_the_server_is_told_to_close_it_counts_too(stage: Stage, stream: bool) -> None:
    async def run(task: Task, client: Any) -> None:
        with await by_hand(client, "Connection: close", stream=stream) as socket:
            await drained(socket)
            assert await asyncio.get_running_loop().sock_recv(socket, 1) == b""

    record = await stage.play(run, "one")
    assert stage.trained(record) == ["one"] and "policy/undelivered" not in record.metrics


async def test_an_answer_larger_than_the_buffers_counts_when_it_is_taken(stage: Stage) -> None:
    """Five megabytes, of which a client reads two thousand bytes while it stays."""
    n = 80_000
    stage.engine = ScriptedEngine(lambda request: Reply([65] * n, [-0.5] * n, finish_reason="length"))

    async def played(read: Any) -> Trajectory:
        async def run(task: Task, client: Any) -> None:
            with await by_hand(client, logprobs=True) as socket:
                await read(socket)

        return await stage.played(FunctionExecutor(run), limits=LIMITS)

    async def beginning(socket: Any) -> None:
        await asyncio.get_running_loop().sock_recv(socket, 2000)

    assert (await played(beginning)).rows() == []
    assert [int(row.loss_mask.sum()) for row in (await played(drained)).rows()] == [n]
