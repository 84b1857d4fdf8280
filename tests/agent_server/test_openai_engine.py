"""`--engine openai:URL`: an environment is played by a model that someone else serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl.agent_server.http import anybody, json_response, make_app, read_json
from agentrl.agent_server.listen import bind, listening
from fastapi import Request, Response

from agentrl import EngineError, GenerationRequest, Sampling, ToolEnv, run_episode, tool
from agentrl.engines import openai as openai_engine
from agentrl.engines.openai import OpenAIEngine

from .conftest import Stage


class Adding(ToolEnv):
    """One sum."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        return "What is 2 + 2?", {}

    @tool
    def add(self, a: int, b: int) -> int:
        """Adds."""
        return a + b

    def reward(self, answer: Any) -> float:
        return float(str(answer) == "It is 4.")


CALLS = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}]
REPLIES = [
    {"message": {"role": "assistant", "content": None, "tool_calls": CALLS}, "finish_reason": "tool_calls"},
    {"message": {"role": "assistant", "content": "It is 4."}, "finish_reason": "stop"},
]


class Elsewhere:
    """A chat server of somebody's. `answers` are statuses with bodies, in turn."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.app = make_app("elsewhere", authorize=anybody)

        @self.app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "big"}]}

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            self.asked.append((request.headers.get("authorization"), await read_json(request)))
            status, body = self.answers[len(self.asked) - 1]
            return json_response(body, status)


@pytest.fixture
async def elsewhere() -> AsyncIterator[Any]:
    stack: list[Any] = []

    async def start(*answers: tuple[int, Any]) -> tuple[Elsewhere, str]:
        server = Elsewhere(list(answers))
        context = listening(server.app, bind("127.0.0.1", 0), "off")
        stack.append(context)
        return server, f"{await context.__aenter__()}/v1"

    yield start
    for context in stack:
        await context.__aexit__(None, None, None)


async def test_an_env_with_tools_is_played(stage: Stage, elsewhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "BACKOFF_S", (0.01,))
    server, url = await elsewhere((503, {}), *((200, {"choices": [reply]}) for reply in REPLIES))
    engine = OpenAIEngine(url, stage.renderer, token="key")
    record = await run_episode(Adding, engine, stage.renderer, sampling=Sampling(temperature=0.5, max_new_tokens=99))
    assert record.error is None and record.total_reward == 1.0
    assert {authorization for authorization, _ in server.asked} == {"Bearer key"}
    *_, last = [body for _, body in server.asked]
    assert (last["model"], last["temperature"], last["max_tokens"]) == ("big", 0.5, 99)
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "tool"]
    (call,) = last["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 2}
    assert last["messages"][2]["tool_call_id"] == call["id"] and last["messages"][2]["content"] == "4"
    assert last["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize(("status", "body"), [(401, {"error": "no"}), (200, {"choices": []}), (200, [1])])
async def test_what_is_no_answer_is_the_engines_error(stage: Stage, elsewhere: Any, status: int, body: Any) -> None:
    _, url = await elsewhere((status, body))
    engine = OpenAIEngine(url, stage.renderer, model="m")
    prompt = stage.renderer.start([{"role": "user", "content": "hi"}])
    with pytest.raises(EngineError):
        await engine.generate(GenerationRequest(prompt.token_ids, Sampling()))


async def test_ids_that_no_conversation_gave_are_refused(stage: Stage) -> None:
    with pytest.raises(EngineError, match="rendered conversations"):
        await OpenAIEngine("http://127.0.0.1:9/v1", stage.renderer).generate(GenerationRequest((1, 2), Sampling()))
