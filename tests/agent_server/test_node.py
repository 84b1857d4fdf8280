"""An agent in another language, in a process of its own, behind the agent protocol."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from agentrl import Limits, RemoteAgentExecutor

from ..node_agent import node_agent
from .conftest import Stage
from .test_frameworks import ASKED, SEVENTEEN, call
from .test_remote_agent import order

pytestmark = pytest.mark.slow


async def test_a_node_agent_is_trained_like_any_other(stage: Stage, tmp_path: Path) -> None:
    with node_agent(tmp_path) as url:
        executor = RemoteAgentExecutor(url)
        record = await stage.played(executor, ASKED, "It is 391", task=SEVENTEEN)
        assert record.error is None and record.total_reward == 1.0
        assert stage.trained(record) == [f"{ASKED}|It is 391"]
        assert [message["content"] for message in record.messages if message["role"] == "tool"] == ["391"]
        wrong = [call("calculator", expression="1/0"), "no number"]
        record = await stage.played(executor, *wrong, task=SEVENTEEN)
        assert record.total_reward == 0.0 and stage.trained(record) == ["|".join(wrong)]
        limits = Limits(max_turns=1, max_new_tokens=200)
        record = await stage.played(executor, ASKED, task=SEVENTEEN, limits=limits)
        assert record.truncated and record.error is None and stage.trained(record) == [ASKED]
        await _speaks_the_protocol(url)


async def _speaks_the_protocol(url: str) -> None:
    async with aiohttp.ClientSession(url) as http:

        async def status(method: str, path: str = "", **options: object) -> int:
            async with asyncio.timeout(30), http.request(method, f"/v1/episodes{path}", **options) as response:  # type: ignore[arg-type]
                await response.json()
                return response.status

        nowhere = {**order()["policy"], "base_url": "http://127.0.0.1:9/v1"}
        assert await status("POST", json=order(policy=nowhere)) == 202
        assert await status("POST", json=order(policy=nowhere)) == 202
        assert await status("POST", json=order(policy=nowhere, idempotency_key="other")) == 409
        assert await status("GET", "/e", params={"attempt": "7"}) == 409
        assert await status("GET", "/e", params={"attempt": "0", "wait_s": "25"}) == 500
        assert await status("GET", "/unknown") == 404
        assert await status("POST", data=b"{") == 400
        assert await status("DELETE", "/e", params={"attempt": "0"}) == 200
        assert await status("GET", "/e") == 404
