"""An env server that is away, silent, full or asked too much: what an episode and a run make of it."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.env_offer import Offer
from agentrl.agent_server.env_service import EnvLimits, EnvService
from agentrl.agent_server.http import ApiError, Bounds
from agentrl.agent_server.listen import bind, listening
from agentrl.envs.env_client import EnvClient, Link
from agentrl.envs.remote import RemoteEnv, served

from agentrl import Action, ConfigError, Env, EnvError, InfrastructureError, Limits, Task, run_episode
from agentrl.assemble import make_executor
from agentrl.config import Config
from agentrl.env_session import EnvSession
from agentrl.errors import BusyError
from agentrl.task_list import NotReadYet, without_waiting

from ..agent_server.conftest import Stage
from ..agent_server.serving import until
from ..background import serving_envs
from ..core.test_loop import make_loop

TASKS = 84


class Slow(Env):
    """Takes its time, and brings tasks of 20 kB."""

    max_turns = 1

    @classmethod
    def tasks(cls, split: str = "train") -> Any:
        return [Task(str(i), "x" * 20_000, "fine") for i in range(TASKS)] if split == "train" else ()

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        await asyncio.sleep(0.1)
        return "slow", {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0.1)
        return "", 1.0, True, False, {}


async def test_a_run_waits_for_the_tasks_of_a_server_that_is_away(tmp_path: Path, monkeypatch: Any) -> None:
    """The server is served by the event loop that the run is on: it could not come back if the run held that up."""
    async with listening(env_app({"slow": Slow}), bind("127.0.0.1", 0)) as url:
        env = await asyncio.to_thread(served, f"{url}/slow")
        env.link.patience = 0.2
        tasks = await asyncio.to_thread(env.tasks, "train")
        assert (len(tasks), tasks[49].id) == (TASKS, "49")  # type: ignore[arg-type, index]
        with without_waiting(), pytest.raises(NotReadYet, match=f"task 60 of --env {url}/slow, split train"):
            tasks[60]  # type: ignore[index]
    loop, trainer, _ = make_loop(tmp_path, tasks, batch_groups=12, max_staleness=0)  # type: ignore[arg-type]
    run = asyncio.ensure_future(loop.run())
    await until(lambda: "is not read yet" in loop.dispatcher._what_is_awaited())  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    refusals, page = 2, Offer.page

    async def unsteady(self: Any, *asked: Any) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise ApiError(503, "busy", retryable=True)
        return await page(self, *asked)

    monkeypatch.setattr(Offer, "page", unsteady)
    async with listening(env_app({"slow": Slow}), bind("127.0.0.1", int(url.rpartition(":")[2]))):
        await run
        refusals = 1
        assert (await asyncio.to_thread(lambda: env.tasks("train")[-1])).id == str(TASKS - 1)  # type: ignore[index]
    assert [len(rows) for rows in trainer.batches] == [36] * (TASKS // 12)
    assert refusals < 0


def test_what_begins_in_mid_run_waits_for_a_server_that_is_away(monkeypatch: Any) -> None:
    """A worker process that replaces another asks what the env is like, and so does a `RemoteEnv` of the user's own."""
    monkeypatch.setattr("agentrl.envs.remote_tasks.WAIT_FOR_SERVER_S", 0.1)
    with serving_envs({"slow": Slow}) as url:
        port = int(url.rpartition(":")[2])
    config = Config.model_validate({"env": {"name": [f"{url}/slow"]}})
    with pytest.raises(ConfigError, match="no env server answers"):
        make_executor(config)
    with ThreadPoolExecutor(2) as threads:
        worker = threads.submit(make_executor, config, patient=True)
        own = threads.submit(RemoteEnv, url)
        time.sleep(0.5)
        with serving_envs({"slow": Slow}, port=port):
            assert (worker.result().name, own.result().max_turns) == (f"{url}/slow", 1)
    with pytest.raises(InfrastructureError, match=f"env server {url}: no answer to envs in 0.2 s"):
        RemoteEnv(url, patience_s=0.2)


@pytest.mark.parametrize("transport", ["stream", "http"])
async def test_a_failure_that_may_pass_is_tried_again_a_few_times(transport: str, monkeypatch: Any) -> None:
    failures, begin, opened = 2, EnvService.begin_step, EnvService.open

    def fails() -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ApiError(503, "busy", retryable=True)

    def step(self: Any, *asked: Any) -> Any:
        fails()
        return begin(self, *asked)

    async def open_session(self: Any, *asked: Any) -> Any:
        fails()
        return await opened(self, *asked)

    monkeypatch.setattr(EnvService, "begin_step", step)
    monkeypatch.setattr(EnvService, "open", open_session)
    async with listening(env_app({"slow": Slow}), bind("127.0.0.1", 0)) as url:
        env = await asyncio.to_thread(RemoteEnv, url)
        client = env.link.take()
        client._stream = transport == "stream"
        await env.reset(seed=0)
        failures = 2
        assert (await env.step(Action("a")))[1] == 1.0
        failures = 10
        with pytest.raises(InfrastructureError, match="busy"):
            await env.reset(seed=0)
        assert failures == 7
        await env.close()
        await env.link.give_back(client)


async def test_a_reset_that_is_given_up_leaves_no_session() -> None:
    """Whether the server had not begun, was at it, or had answered."""
    async with listening(env_app({"slow": Slow}, limits=EnvLimits(sessions=4)), bind("127.0.0.1", 0)) as url:
        env_class = await asyncio.to_thread(served, url)
        link = env_class.link
        client = link.take()
        for i in range(8):
            env = env_class()
            reset = asyncio.ensure_future(env.reset(seed=i))
            await asyncio.wait({reset}, timeout=0.03 * i)
            reset.cancel()
            await asyncio.wait({reset})
            await env.close()
        assert client._pending == {}
        for _ in range(4):
            async with asyncio.timeout(20):
                while True:
                    with suppress(BusyError):
                        await client.call("create", env="slow", seed=0)
                        break
                    await asyncio.sleep(0.05)
        await link.give_back(client)


async def test_a_full_server_costs_no_episode(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Each waits far longer than one call may take."""
    monkeypatch.setattr("agentrl.env_session.BUSY_PAUSE_S", 0.05)
    stage = Stage(says=["a"] * 8)
    async with listening(env_app({"slow": Slow}, limits=EnvLimits(sessions=1)), bind("127.0.0.1", 0)) as url:
        env = await asyncio.to_thread(served, url)
        limits = Limits(max_turns=1, call_timeout_s=2.0)
        playing = [run_episode(env, stage.engine, stage.renderer, Task(str(i)), limits=limits) for i in range(8)]
        with caplog.at_level(logging.WARNING):
            records = await asyncio.gather(*playing)
        assert [record.error for record in records] == [None] * 8
        assert sum("all its sessions are taken" in line for line in caplog.messages) == 1
        holder, other = env(), env()
        await holder.reset(seed=0)
        async with EnvSession(lambda: other, 2.0) as session:
            with pytest.raises(BusyError):
                await session.reset(0, {}, busy_s=0.1)
        await holder.close()


@pytest.mark.parametrize("says", ["nothing", "the handshake"])
async def test_a_server_that_stays_silent_is_given_up(says: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await asyncio.sleep(60)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    client = EnvClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 0.5, resend_s=0.3)
    client._stream = says == "nothing"
    async with asyncio.timeout(20):
        with pytest.raises(InfrastructureError, match="says nothing"):
            await client.call("create", env="x")
    await client.close()
    server.close()


async def test_a_call_that_is_too_large_costs_itself_alone() -> None:
    class Waits(Slow):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0.5)
            return await super().step(action)

    async with listening(env_app({"waits": Waits}, bounds=Bounds(body=100_000)), bind("127.0.0.1", 0)) as url:
        link = Link(url, None, 45.0)
        one, other = [await asyncio.to_thread(RemoteEnv, url) for _ in range(2)]
        one.link = other.link = link
        await one.reset(seed=0, options={"task": Task("t")})
        client = one._client
        assert client is not None and client._socket is not None
        socket, step = client._socket, asyncio.ensure_future(one.step(Action("a")))
        with pytest.raises(EnvError, match="100000 bytes"):
            await other.reset(seed=0, options={"task": Task("t", "p" * 200_000)})
        assert (await step)[1] == 1.0
        assert not socket.closed and client._socket is socket
        await one.close()
        await other.close()
