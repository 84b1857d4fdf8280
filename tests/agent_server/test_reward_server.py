"""The reward server and its clients: ours, and a body as OpenRLHF sends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agentrl.agent_server.listen import bind, listening
from agentrl.agent_server.reward_app import reward_app

from agentrl import ConfigError, EnvError, InfrastructureError
from agentrl.backoff import retry_after
from agentrl.reward_client import served_reward


@asynccontextmanager
async def serving(function: Any, port: int = 0, **options: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    app = reward_app(function, **options)
    async with listening(app, bind("127.0.0.1", port)) as url, aiohttp.ClientSession(url) as http:
        yield url, http


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


def grade(prompt: Any, completion: str, label: Any) -> Any:
    if completion == "raise":
        raise ValueError("broken on purpose")
    if completion == "none":
        return None
    return {"reward": float(completion == label), "score": 0.5, "metrics": {"length": len(completion)}}


async def test_one_at_a_time() -> None:
    async with serving(grade) as (_, http):
        body = {"prompts": ["p"] * 3, "completions": ["a", "b", "none"], "labels": ["a", "a", None]}
        assert await post(http, "/v1/reward", body) == (
            200,
            {
                "rewards": [1.0, 0.0, None],
                "scores": [0.5, 0.5, None],
                "metrics": [{"length": 1.0}, {"length": 1.0}, {}],
            },
        )
        status, reply = await post(http, "/v1/reward", {"prompts": ["p"], "completions": ["raise"]})
        assert (status, reply["error"]["class"], reply["error"]["retryable"]) == (500, "EnvError", False)
        for wrong in ({}, {"prompts": ["p"], "completions": []}, {"prompts": "p", "completions": ["a"]}, [1]):
            assert (await post(http, "/v1/reward", wrong))[0] == 422
        assert (await post(http, "/v1/reward", {"prompts": [], "completions": []}))[1]["rewards"] == []


async def test_openrlhf_form() -> None:
    async with serving(grade) as (_, http):
        body = {
            "query": ["question: yes", "elsewhere"],
            "prompts": ["question: ", "question: "],
            "labels": ["yes", "elsewhere"],
        }
        status, reply = await post(http, "/get_reward", body)
        assert (status, reply) == (200, {"rewards": [1.0, 1.0], "scores": [0.5, 0.5]})
        assert (await post(http, "/get_reward", {"query": ["a"], "prompts": ["a", "b"]}))[0] == 422
        assert (await post(http, "/get_reward", {"query": ["a", "b"], "prompts": ["a"]}))[0] == 422


async def test_a_function_of_lists_is_given_completions_of_many_requests() -> None:
    sizes: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def many(prompts: list[Any], completions: list[str]) -> list[float]:
        sizes.append(len(completions))
        begun.set()
        go.wait(20)
        return [float(len(text)) for text in completions]

    async with serving(many, max_batch=8) as (_, http):
        first = asyncio.ensure_future(post(http, "/v1/reward", {"prompts": ["p"], "completions": ["x"]}))
        await asyncio.to_thread(begun.wait, 20)
        bodies = [{"prompts": ["p"], "completions": ["x" * n]} for n in range(11)]
        rest = [asyncio.ensure_future(post(http, "/v1/reward", body)) for body in bodies]
        await asyncio.sleep(0.3)
        go.set()
        assert [(await answer)[1]["rewards"] for answer in (first, *rest)] == [[1.0], *([float(n)] for n in range(11))]
        assert sizes == [1, 8, 3]


async def test_a_slow_completion_delays_no_other_and_calls_that_hang_are_bounded() -> None:
    go = threading.Event()

    def function(completion: str) -> float:
        if completion == "slow":
            go.wait(60)
        return 1.0

    def body(text: str, n: int = 1) -> dict[str, Any]:
        return {"prompts": ["p"] * n, "completions": [text] * n}

    async with serving(function, timeout_s=30) as (_, http):
        slow = asyncio.ensure_future(post(http, "/v1/reward", body("slow")))
        answers = await asyncio.gather(*(post(http, "/v1/reward", body("fast")) for _ in range(10)))
        assert [status for status, _ in answers] == [200] * 10 and not slow.done()
        go.set()
        assert (await slow)[0] == 200
    go.clear()
    async with serving(function, timeout_s=0.05, max_batch=4) as (_, http):
        before = threading.active_count()
        statuses = [(await post(http, "/v1/reward", body("slow", 12)))[0] for _ in range(3)]
        assert statuses == [504, 503, 503] and threading.active_count() - before <= 2 * 4
        go.set()
        for _ in range(100):
            status, _ = await post(http, "/v1/reward", body("fast"))
            if status == 200:
                break
            await asyncio.sleep(0.05)
        assert status == 200


@pytest.mark.parametrize("result", [[1.0], 3.0, {"scores": [1, 2]}, None, ["x", "y"]])
async def test_a_function_of_lists_must_return_as_many(result: Any) -> None:
    async with serving(lambda completions: result) as (_, http):
        status, reply = await post(http, "/v1/reward", {"prompts": ["p"] * 2, "completions": ["a", "b"]})
        assert (status, reply["error"]["class"]) == (500, "EnvError")


async def test_rewards_of_arrays_and_dicts() -> None:
    import numpy as np

    for result in (np.array([0.5, np.nan]), {"rewards": np.array([0.5, np.inf]), "scores": (0.5, None)}):
        async with serving(lambda queries, result=result: result) as (_, http):
            reply = (await post(http, "/v1/reward", {"prompts": ["p"] * 2, "completions": ["a", "b"]}))[1]
            assert reply["rewards"] == [0.5, None]


def test_functions_that_cannot_be_asked() -> None:
    for function in (lambda: 0.0, lambda question: 0.0, lambda prompts, answer: 0.0):
        with pytest.raises(ConfigError, match="--fn"):
            reward_app(function)


async def test_the_client() -> None:
    async with serving(grade, token="sesame") as (url, _):
        ask = served_reward(url, "sesame")
        answers = await asyncio.gather(*(ask("p", text, "a") for text in ("a", "b", "none")))
        assert [answer["reward"] for answer in answers] == [1.0, 0.0, None]
        assert answers[0]["metrics"] == {"length": 1.0}
        with pytest.raises(EnvError, match="broken on purpose"):
            await ask("p", "raise", None)
        with pytest.raises(ConfigError, match=r"--env\.token-file"):
            await served_reward(url, "wrong")("p", "a", "a")
    for wrong in ("localhost:1", "http://a,localhost:1", "http://user:secret@host"):
        with pytest.raises(ConfigError):
            served_reward(wrong, None)


async def test_servers_share_the_work_and_stand_in_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.reward_client.MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr("agentrl.reward_client.PATIENCE_S", 1.0)
    counts = [0, 0]

    def counted(which: int) -> Any:
        async def function(completion: str) -> float:
            counts[which] += 1
            await asyncio.sleep(0.05)
            return 1.0

        return function

    async with serving(counted(0)) as (one, _):
        async with serving(counted(1)) as (other, _):
            ask = served_reward(f"{one},{other}", None)
            await asyncio.gather(*(ask("p", "c", None) for _ in range(10)))
            assert counts == [5, 5]
        answers = await asyncio.gather(*(ask("p", "c", None) for _ in range(10)))
        assert [answer["reward"] for answer in answers] == [1.0] * 10
        assert counts == [15, 5]
    with pytest.raises(InfrastructureError, match="no reward server answers"):
        await ask("p", "c", None)
    waiting = asyncio.ensure_future(ask("p", "c", None))
    await asyncio.sleep(0.6)
    async with serving(counted(0), port=int(one.rpartition(":")[2])):
        assert (await waiting)["reward"] == 1.0


async def test_a_server_that_was_full_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.reward_client.MAX_BACKOFF_S", 0.05)
    counts, full = [0, 0], [True]

    def counted(which: int) -> Any:
        async def function(completion: str) -> float:
            counts[which] += 1
            if which == 0 and full:
                full.clear()
                raise InfrastructureError("full")
            await asyncio.sleep(0.01)
            return 1.0

        return function

    async with serving(counted(0)) as (one, _), serving(counted(1)) as (other, _):
        ask = served_reward(f"{one},{other}", None)
        assert (await ask("p", "c", None))["reward"] == 1.0 and counts == [1, 1]
        await asyncio.sleep(0.06)
        for _ in range(5):
            await asyncio.gather(*(ask("p", "c", None) for _ in range(4)))
    assert counts[0] > 8 and sum(counts) == 22


@pytest.mark.parametrize("after", ["9" * 400, "²", "-1", "Mon, 30 Nov 2026 00:00:00 GMT", "2"])
def test_how_long_to_wait_is_read_from_anything(after: str) -> None:
    assert retry_after(after) == {"9" * 400: 60.0, "2": 2.0}.get(after, 0.0)


def test_in_a_single_turn_run(tmp_path: Path) -> None:
    from agentrl.assemble import make_executor
    from agentrl.config import Config

    token = tmp_path / "token"
    token.write_text("t")
    config = {"reward": {"name": ["http://127.0.0.1:1", "http://127.0.0.1:2,http://127.0.0.1:3"], "weights": [1, 2]}}
    executor: Any = make_executor(Config.model_validate({**config, "env": {"token_file": str(token)}}))
    assert len(executor.rewards) == 2
