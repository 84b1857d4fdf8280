"""Bodies that nobody should send: an error of the client's, never of the server's, and never a hang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from agentrl.agent_server.http import Bounds
from agentrl.agent_server.listen import bind, listening
from agentrl.agent_server.policy_app import policy_app
from agentrl.agent_server.policy_chat import ChatExchange
from agentrl.agent_server.policy_desk import RolloutDesk
from agentrl.agent_server.policy_errors import fault_of
from agentrl.agent_server.policy_messages import MessagesExchange
from agentrl.agent_server.policy_responses import ResponsesExchange
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Limits, RolloutContext, Sampling, Task, Trajectory
from agentrl.policy_session import PolicySession

from .conftest import TOOL, Stage

CALL: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT: Any = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "stop": ["x"],
    "n": 1,
    "max_tokens": 5,
    "temperature": 1.0,
    "stream": False,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "stream_options": {"include_usage": True},
}
MESSAGES: Any = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [], "is_error": False}]},
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "base64", "media_type": "a/b", "data": "AA"}}],
        },
    ],
    "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
}
RESPONSES: Any = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "summary": []},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {}}],
    "text": {"format": {"type": "text"}},
    "previous_response_id": None,
}
DIALECTS = [(ChatExchange, CHAT), (MessagesExchange, MESSAGES), (ResponsesExchange, RESPONSES)]
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["image_url", "text", "tool", "assistant", "\ud800", "http://127.0.0.1/", "/etc/passwd"])
    | st.sampled_from([10**400, '{"a":' * 600 + "1" + "}" * 600, "[" * 10**5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "function", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where anything stands in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in inner for path in paths(item, (*here, key)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    if isinstance(value, dict):
        return {**value, path[0]: replaced(value[path[0]], path[1:], odd)}
    return [replaced(item, path[1:], odd) if i == path[0] else item for i, item in enumerate(value)]


STAGE = Stage()


def new_session(stage: Stage) -> PolicySession:
    ctx = RolloutContext(stage.engine, stage.renderer, Sampling(), Limits(), seed=1)
    return PolicySession(ctx, Trajectory(Task("t")), warn=lambda message: None)


@pytest.mark.parametrize(("dialect", "body"), DIALECTS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_body_with_something_odd_in_it_is_answered_or_refused(dialect: Any, body: Any, data: Any) -> None:
    path = data.draw(st.sampled_from([path for path in paths(body) if path]))
    odd = replaced(body, path, data.draw(ODD))

    async def ask() -> None:
        session = new_session(STAGE)
        STAGE.says, STAGE._said = ["one"] * 200, 0
        exchange = dialect(odd, session, "m")
        call = session.ask(exchange.ask, json.dumps(odd))
        async with call.attended():
            turns = await call.turns()
            json.dumps(exchange.whole(call, turns))
            assert b"".join([*exchange.opening(call), *exchange.said(call, turns), *exchange.closing(call, turns)])

    try:
        asyncio.run(ask())
    except Exception as error:
        assert fault_of(error).status < 500, odd


@pytest.mark.parametrize(("dialect", "body"), DIALECTS[::2])
def test_the_body_that_is_varied_is_a_good_one(dialect: Any, body: Any) -> None:
    assert dialect(body, new_session(STAGE), "m").ask.messages


# ---------------------------------------------------------------------- over a port

ROUTES = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/rollouts/self/reward", "/tokenize"]


@pytest.fixture
async def door(stage: Stage) -> AsyncIterator[tuple[str, str]]:
    """(URL, key) of a server with small bounds and one rollout."""
    desk = RolloutDesk("m", 4096, stage.renderer)
    key = desk.open(new_session(stage))
    async with listening(policy_app(desk, Bounds(body=4096, depth=20)), bind("127.0.0.1", 0), "off") as url:
        yield url, key


async def test_bodies_that_are_no_json_objects(door: tuple[str, str]) -> None:
    url, key = door
    bad: dict[bytes, int] = {
        b"": 400,
        b"{": 400,
        b"[]": 400,
        b'"x"': 400,
        b"\xff\xfe{}": 400,
        b'{"a":' + b"[" * 30 + b"]" * 30 + b"}": 400,
        b'{"messages": 1e999}': 400,
        b"x" * 5000: 413,
    }
    async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
        for route in ROUTES:
            for body, status in bad.items():
                async with http.post(url + route, data=body) as response:
                    said = await response.json()
                    assert (response.status, response.headers["x-should-retry"]) == (status, "false"), (route, body)
                    assert said["error"]["message"]


async def test_a_key_is_asked_for_everywhere_but_at_health(door: tuple[str, str]) -> None:
    url, key = door
    async with aiohttp.ClientSession() as http:
        assert await (await http.get(f"{url}/health")).text() == "ok"
        for path in ("/v1/models", "/metrics", "/openapi.json", *ROUTES):
            method = "POST" if path in ROUTES else "GET"
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"x-api-key": ""},
                {"Authorization": f"Basic {key}"},
            ):
                async with http.request(method, url + path, headers=headers) as response:
                    assert response.status == 401, path
        async with http.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {key}"}) as response:
            described = await response.json()
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= described["paths"].keys()
        assert "ChatRequest" in described["components"]["schemas"]
        async with http.get(f"{url}/v1/nothing", headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"
