"""A rollout's key opens that rollout and nothing else, and stands in no log, record or answer."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import openai
import pytest
from agentrl.agent_server import agent_app
from agentrl.agent_server.listen import bind, listening

from agentrl import FunctionExecutor, RemoteAgentExecutor, Task
from agentrl.executor import describe_error

from .conftest import Stage

HI: Any = [{"role": "user", "content": "hi"}]


async def test_two_rollouts_on_one_server_see_nothing_of_each_other() -> None:
    clients: dict[str, openai.AsyncOpenAI] = {}
    both = asyncio.Barrier(2)
    over = asyncio.Event()

    async def run(task: Task, client: openai.AsyncOpenAI) -> None:
        clients[task.id] = client
        mine = await client.responses.create(model="m", input="hi")
        await both.wait()
        (theirs,) = (other for name, other in clients.items() if name != task.id)
        with pytest.raises(openai.BadRequestError, match="in this rollout"):
            await theirs.responses.create(model="m", input="go on", previous_response_id=mine.id)
        await client.post("/rollouts/self/reward", cast_to=object, body={"reward": float(task.id)})
        await both.wait()
        if task.id == "1":
            await client.post("/rollouts/self/end", cast_to=object)
            over.set()
        else:
            await over.wait()
            with pytest.raises(openai.APIStatusError, match="has ended"):
                await theirs.chat.completions.create(model="m", messages=HI)
            await client.chat.completions.create(model="m", messages=HI)

    executor = FunctionExecutor(run)
    stages = Stage(), Stage()
    playing = (stage.played(executor, "one", "two", task=Task(f"{k}")) for k, stage in enumerate(stages))
    zero, one = await asyncio.gather(*playing)
    assert zero.error is one.error is None
    assert [len(stage.engine.requests) for stage in stages] == [2, 1]
    assert (zero.total_reward, one.total_reward) == (0.0, 1.0)
    await executor.close()


async def test_keys_and_tokens_stand_in_no_log_record_or_answer(
    stage: Stage, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    (tmp_path / "token").write_text("correct-horse")
    caplog.set_level(logging.DEBUG)
    keys: list[str] = []

    async def run(task: Task, client: openai.AsyncOpenAI) -> None:
        keys.append(client.api_key)
        await client.chat.completions.create(model="m", messages=HI)
        raise RuntimeError(f"cannot go on with {client.api_key}") from ValueError(client.api_key)

    app = agent_app(run, token_file=str(tmp_path / "token"))
    async with listening(app, bind("127.0.0.1", 0), "off") as url:
        records = [
            await stage.played(RemoteAgentExecutor(url, token="correct-horse"), "one"),
            await stage.played(FunctionExecutor(run), "two"),
        ]
    said = json.dumps([describe_error(record.error) for record in records if record.error], ensure_ascii=False)
    assert said.count("cannot go on with sk-rollout-…") >= 2 and "RuntimeError" in caplog.text
    for secret in (*keys, "correct-horse"):
        assert secret not in said and secret not in caplog.text
