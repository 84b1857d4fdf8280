"""Agents in agent servers: the protocol, the load, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from agentrl.agent_server import agent_app, agent_servers
from agentrl.agent_server.agent_wire import EpisodeRequest, PolicyAccess
from agentrl.agent_server.executors import AgentOptions
from agentrl.agent_server.http import anybody, make_app
from agentrl.agent_server.listen import bind, listening
from anthropic import AsyncAnthropic
from fastapi import FastAPI, Request, Response
from PIL import Image as PILImage

from agentrl import (
    AgentError,
    ConfigError,
    FunctionExecutor,
    Image,
    InfrastructureError,
    Limits,
    RemoteAgentExecutor,
    Task,
)
from agentrl.single_turn import SingleTurnExecutor

from .conftest import Stage, until

ServeAgent = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[ServeAgent]:
    """await serve(app) -> URL"""
    async with AsyncExitStack() as stack:

        async def start(app: FastAPI) -> str:
            return await stack.enter_async_context(listening(app, bind("127.0.0.1", 0), "off"))

        yield start


async def answer(task: Task, client: Any) -> Any:
    """One turn."""
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(task.prompt)}])
    return {"reward": len(reply.choices[0].message.content), "metrics": {"m": 1}}


async def test_an_agent_elsewhere_gets_the_whole_task_and_is_trained(stage: Stage, serve: ServeAgent) -> None:
    seen: list[Task] = []

    async def run(task: Task, client: Any) -> Any:
        seen.append(task)
        return await answer(task, client)

    picture = Image(PILImage.new("RGB", (3, 2), "blue"))
    task = Task("7", "hi", label=2**55 + 1, images=(picture,), row={"a": [1, None, "x"]}, env="sums")
    executor = RemoteAgentExecutor(await serve(agent_app(run)))
    record = await stage.played(executor, "one", task=task)
    assert record.error is None and record.total_reward == 3.0 and record.metrics["m"] == 1.0
    assert stage.trained(record) == ["one"] and seen == [task]
    again = await stage.played(executor, "four", task=task)
    assert again.total_reward == 4.0


@pytest.mark.parametrize(
    ("outcome", "reward", "score"),
    [
        (np.float32(0.5), 0.5, 0.5),
        (np.bool_(True), 1.0, 1.0),
        ({"reward": np.array(2), "score": np.float32(0.25), "metrics": {"m": np.int64(3), "nan": np.nan}}, 2.0, 0.25),
        ({"score": np.float16(0.25), "metrics": {"m": np.int64(3)}}, None, None),
        ({"reward": "2"}, None, None),
    ],
)
async def test_an_outcome_is_the_same_from_here_and_from_elsewhere(
    stage: Stage, serve: ServeAgent, outcome: Any, reward: float | None, score: float | None
) -> None:
    async def run(task: Task, client: Any) -> Any:
        await answer(task, client)
        return outcome

    for executor in (FunctionExecutor(run), RemoteAgentExecutor(await serve(agent_app(run)))):
        record = await stage.played(executor, "one")
        assert record.error is None and (record.total_reward, record.score) == (reward, score)
        assert not isinstance(outcome, dict) or record.metrics == ({"m": 3.0} if "metrics" in outcome else {})


async def test_the_client_is_the_one_that_is_annotated(stage: Stage, serve: ServeAgent) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        return 1.0

    assert (await stage.played(RemoteAgentExecutor(await serve(agent_app(run))), "one")).total_reward == 1.0


async def test_a_proxy_of_the_environment_does_not_stand_between(
    stage: Stage, serve: ServeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    async def by_anthropic(task: Task, client: AsyncAnthropic) -> float:
        await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        return 1.0

    for executor in (FunctionExecutor(answer), FunctionExecutor(by_anthropic)):
        record = await stage.played(executor, "one")
        assert record.error is None and stage.trained(record) == ["one"]


async def test_what_the_agent_raises_is_its_own_fault(stage: Stage, serve: ServeAgent) -> None:
    async def run(task: Task, client: Any) -> Any:
        raise KeyError("gone")

    error = (await stage.played(RemoteAgentExecutor(await serve(agent_app(run))))).error
    assert isinstance(error, AgentError) and "KeyError" in str(error)


async def test_a_reward_function_judges_instead(stage: Stage, serve: ServeAgent) -> None:
    def grade(completion: str, label: Any) -> dict[str, Any]:
        return {"reward": float(completion == label), "score": 0.5}

    options = AgentOptions(judge=SingleTurnExecutor(grade))
    executor = RemoteAgentExecutor(await serve(agent_app(answer)), options)
    record = await stage.played(executor, "one", task=Task("t", "hi", label="one"))
    assert (record.total_reward, record.score) == (1.0, 0.5)


async def test_the_load_is_shared_and_a_dead_server_is_avoided(stage: Stage, serve: ServeAgent) -> None:
    places: list[str] = []
    both = asyncio.Barrier(2)

    def named(name: str) -> FastAPI:
        async def run(task: Task, client: Any) -> Any:
            places.append(name)
            await both.wait()
            return await answer(task, client)

        return agent_app(run)

    dead = bind("127.0.0.1", 0)
    port = dead.getsockname()[1]
    dead.close()
    another = await serve(make_app("no agent", authorize=anybody))
    urls = [await serve(named("a")), f"http://127.0.0.1:{port}", another, await serve(named("b"))]
    executor = RemoteAgentExecutor(urls)
    stage.says = ["one"] * 8
    for _ in range(2):
        records = await asyncio.gather(stage.played(executor, *stage.says), stage.played(executor, *stage.says))
        assert [record.error for record in records] == [None, None]
    assert sorted(places[:2]) == sorted(places[2:]) == ["a", "b"]


async def test_a_machine_that_says_nothing_has_not_taken_the_episode(
    stage: Stage, serve: ServeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody accepts there, and the queue is full."""
    monkeypatch.setattr(agent_servers, "CONNECT_S", 0.2)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        waiting = stack.enter_context(socket.create_connection(silent.getsockname()))
        urls = [f"http://127.0.0.1:{waiting.getpeername()[1]}", await serve(agent_app(answer))]
        record = await stage.played(RemoteAgentExecutor(urls), "one")
    assert record.error is None and record.total_reward == 3.0


async def test_a_server_that_dies_in_mid_episode_is_infrastructure(
    stage: Stage, serve: ServeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is lost and may be repeated; the next one goes elsewhere."""
    monkeypatch.setattr(agent_servers, "BACKOFF_S", (0.01,))
    begun, stop = asyncio.Event(), asyncio.Event()

    async def run(task: Task, client: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def mortal() -> AsyncIterator[str]:
        async with listening(agent_app(run), bind("127.0.0.1", 0), "off") as url:
            yield url

    async def die() -> None:
        async with mortal() as url:
            urls.append(url)
            ready.set()
            await stop.wait()

    urls: list[str] = []
    ready = asyncio.Event()
    server = asyncio.ensure_future(die())
    await ready.wait()
    urls.append(await serve(agent_app(answer)))
    executor = RemoteAgentExecutor(urls)
    playing = asyncio.ensure_future(stage.played(executor, "one"))
    await begun.wait()
    stop.set()
    await server
    record = await playing
    assert isinstance(record.error, InfrastructureError) and "lost in mid-episode" in str(record.error)
    assert record.error.retryable
    assert (await stage.played(executor, "one")).total_reward == 3.0


async def test_nobody_there_is_infrastructure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_servers, "BACKOFF_S", (0.01,))
    error = (await stage.played(RemoteAgentExecutor("http://127.0.0.1:9"))).error
    assert isinstance(error, InfrastructureError) and "no agent server" in str(error)


async def test_an_episode_that_is_over_time_is_cancelled_there_too(stage: Stage, serve: ServeAgent) -> None:
    ended = asyncio.Event()

    async def run(task: Task, client: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    executor = RemoteAgentExecutor(await serve(agent_app(run)))
    record = await stage.played(executor, limits=Limits(episode_timeout_s=0.3))
    assert isinstance(record.error, AgentError) and "episode_timeout_s" in str(record.error)
    await until(ended.is_set)


@pytest.mark.parametrize("reply", [{"reward": 1, "attempt": 5}, [1], {"metrics": 3}])
async def test_answers_that_are_none_cost_the_episode(stage: Stage, serve: ServeAgent, reply: Any) -> None:
    app = make_app("agent", authorize=anybody)

    @app.post("/v1/episodes")
    async def begin() -> Any:
        return reply

    record = await stage.played(RemoteAgentExecutor(await serve(app)))
    if isinstance(reply, dict) and "attempt" in reply:
        assert isinstance(record.error, InfrastructureError) and record.metrics["agent/other_attempt"] == 1
    else:
        assert isinstance(record.error, AgentError)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, b"Internal Server Error", InfrastructureError),
        (500, b'{"error": {"class": "X", "message": "m", "retryable": true}}', InfrastructureError),
        (500, b'{"error": {"class": "X", "message": "m", "retryable": false}}', AgentError),
        (500, b'{"error": "m"}', InfrastructureError),
        (404, b"", InfrastructureError),
        (422, b"{}", AgentError),
    ],
)
async def test_whose_fault_an_error_is(
    stage: Stage, serve: ServeAgent, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, kind: Any
) -> None:
    """An error in our shape says itself; a server that breaks without a word is lost."""
    monkeypatch.setattr(agent_servers, "BACKOFF_S", (0.01,))
    app = make_app("agent", authorize=anybody)

    @app.post("/v1/episodes")
    async def begin() -> Response:
        return Response(body, status)

    assert type((await stage.played(RemoteAgentExecutor(await serve(app)))).error) is kind


async def test_a_plain_200_is_enough_of_a_protocol(stage: Stage, serve: ServeAgent) -> None:
    """Any program can be an agent server; rewards may have been posted meanwhile."""
    app = make_app("agent", authorize=anybody)

    @app.post("/v1/episodes")
    async def begin(request: Request) -> Response:
        policy = (await request.json())["policy"]
        assert policy["base_url"] == policy["anthropic_base_url"] + "/v1"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {policy['api_key']}"}) as http:
            body = {"model": policy["model"], "messages": [{"role": "user", "content": "hi"}]}
            await http.post(f"{policy['base_url']}/chat/completions", json=body)
            await http.post(f"{policy['base_url']}/rollouts/self/reward", json={"reward": 0.5})
        return Response(status_code=200)

    record = await stage.played(RemoteAgentExecutor(await serve(app)), "one")
    assert record.error is None and record.total_reward == 0.5


# ---------------------------------------------------------------------- the protocol, seen from outside


def order(**changes: Any) -> dict[str, Any]:
    policy = PolicyAccess(base_url="http://h/v1", anthropic_base_url="http://h", api_key="k", model="m")
    whole = EpisodeRequest(
        episode_id="e",
        attempt=0,
        task={"id": "t"},
        policy=policy,
        idempotency_key="i",  # type: ignore[arg-type]
    )
    return {**whole.model_dump(), **changes}


async def test_orders_are_idempotent_and_other_attempts_conflict(serve: ServeAgent) -> None:
    begun: list[str] = []
    release = asyncio.Event()

    async def run(task: Task, client: Any) -> Any:
        begun.append(task.id)
        await release.wait()
        return {"score": 1}

    url = f"{await serve(agent_app(run))}/v1/episodes"
    async with aiohttp.ClientSession() as http:

        async def status(method: str, path: str = "", **options: Any) -> tuple[int, Any]:
            async with http.request(method, url + path, **options) as response:
                return response.status, await response.json()

        assert (await status("POST", json=order()))[0] == 202
        assert (await status("POST", json=order()))[0] == 202
        assert (await status("POST", json=order(idempotency_key="other")))[0] == 409
        assert (await status("POST", json=order(idempotency_key="next", attempt=1)))[0] == 202
        assert (await status("GET", "/e", params={"attempt": "0"}))[0] == 409
        assert (await status("GET", "/unknown"))[0] == 404
        waiting = asyncio.ensure_future(status("GET", "/e", params={"wait_s": "30", "attempt": "1"}))
        await until(lambda: len(begun) == 2)
        release.set()
        assert await waiting == (200, {"episode_id": "e", "attempt": 1, "status": "done", "score": 1})
        assert (await status("POST", json={**order(), "policy": 3}))[0] == 422
        assert (await status("POST", data=b"\xff{"))[0] in (400, 422)
        assert begun == ["t", "t"]


async def test_a_token_is_asked_for_and_told_by_name_alone(stage: Stage, serve: ServeAgent, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-word\n")
    url = await serve(agent_app(answer, token_file=str(tmp_path / "token")))
    assert (await stage.played(RemoteAgentExecutor(url, token="secret-word"), "one")).error is None
    with pytest.raises(ConfigError, match="token-file") as raised:
        await stage.played(RemoteAgentExecutor(url, token="another-word"), "one")
    assert "word" not in str(raised.value)


@pytest.mark.parametrize("run", [lambda task: None, lambda task, client: None])
def test_what_is_no_agent_function_is_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match="async def run"):
        agent_app(run)
