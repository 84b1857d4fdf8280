"""Whatever is sent to a server, it answers in its own shape, below 500, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from agentrl.agent_server import agent_app
from agentrl.agent_server.policy_app import policy_app
from agentrl.agent_server.policy_desk import RolloutDesk
from agentrl.agent_server.reward_app import reward_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import Env, Limits, Renderer, Reply, RolloutContext, Sampling, ScriptedEngine, Task, Trajectory
from agentrl.policy_session import PolicySession

from ..background import background, serving_envs
from ..core.sampled import END, TOKENIZER, spelled
from .test_policy_bodies import CHAT, MESSAGES, RESPONSES

FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
DEEP = 100_000


class Still(Env):
    """Answers anything with nothing."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return "", {}

    def step(self, action: Any) -> Any:
        return "", None, False, False, {}


@pytest.fixture(scope="module")
def env_server() -> Iterator[str]:
    with serving_envs({"still": Still}) as url:
        yield url


@pytest.fixture(scope="module")
def reward_server() -> Iterator[str]:
    with background(reward_app(lambda completions, labels: [0.5] * len(completions))) as url:
        yield url


def rollout_desk() -> tuple[RolloutDesk, str]:
    """A desk with one rollout that goes on for long and has sampled something, and its key."""
    renderer = Renderer(TOKENIZER)
    engine = ScriptedEngine(lambda request: Reply((*spelled("yes"), END)), record=False)
    limits = Limits(max_turns=10**6, max_new_tokens=9, max_len=20_000, max_total_tokens=10**9)
    ctx = RolloutContext(engine, renderer, Sampling(max_new_tokens=9), limits, seed=0)
    desk = RolloutDesk("policy", limits.max_len, renderer)
    return desk, desk.open(PolicySession(ctx, Trajectory(Task("t")), warn=lambda message: None))


@pytest.fixture(scope="module")
def policy_server() -> Iterator[tuple[str, str]]:
    desk, key = rollout_desk()
    with background(policy_app(desk)) as url:
        yield url, key


@pytest.fixture(scope="module")
def agent_server() -> Iterator[str]:
    async def run(task: Task, client: Any) -> Any:
        return task.label

    with background(agent_app(run)) as url:
        yield url


numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, 2**64, 1e308, -0.0])
text = st.text(st.characters(exclude_categories=[]), max_size=8)
junk = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def with_keys(**keys: Any) -> Any:
    """Objects with some of the right keys, whose values may be right or junk."""
    chosen = st.fixed_dictionaries({}, optional={key: st.just(value) | junk for key, value in keys.items()})
    return chosen | junk


task = with_keys(id="t", prompt=[{"role": "user", "content": "x"}], label=3, images=[{"type": "image"}], row={"a": 1})
opening = st.fixed_dictionaries({"env": st.just("still")}, optional={"task": task, "seed": junk, "options": junk})
call = with_keys(id="c", name="f", arguments={"a": 1}, raw="{")
action = with_keys(text="a", tool_calls=[{"name": "f"}], finish_reason="stop") | st.fixed_dictionaries(
    {"tool_calls": st.lists(call, max_size=2)}
)
stepping = st.fixed_dictionaries({}, optional={"index": st.integers(0, 2) | junk, "action": action})
rewarding = with_keys(prompts=["p"], completions=["c"], labels=[None], query=["pc"])
broken = st.sampled_from(
    [
        b"",
        b"\xff\xfe{",
        b'{"env": "\xc3"}',
        b'"\\ud800"',
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"env": "still", "seed": 1' + b"0" * 5000 + b"}",
        b'{"env": "still", "options": {"a": 1e999999}}',
        b"nul",
        b"{}{}",
        b"\x00",
    ]
)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


async def check(response: aiohttp.ClientResponse) -> None:
    """JSON below 500; an error says what it is."""
    body = await response.json()
    assert response.status < 500, body
    if response.status >= 400:
        assert set(body["error"]) == {"class", "message", "retryable"}


async def post(url: str, path: str, body: bytes, cut: int | None = None) -> None:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(20)) as http:
        async with http.post(path, data=body if cut is None else body[:cut]) as response:
            await check(response)
        async with http.get("/health") as response:
            assert response.status == 200


@FEW
@given(body=opening.map(encoded) | broken, cut=st.none() | st.integers(0, 30))
async def test_opening(env_server: str, body: bytes, cut: int | None) -> None:
    await post(env_server, "/v1/sessions", body, cut)


@FEW
@given(first=stepping.map(encoded) | broken, second=stepping.map(encoded), cut=st.none() | st.integers(0, 30))
async def test_stepping(env_server: str, first: bytes, second: bytes, cut: int | None) -> None:
    async with aiohttp.ClientSession(env_server, timeout=aiohttp.ClientTimeout(20)) as http:
        async with http.post("/v1/sessions", json={"env": "still"}) as response:
            session = (await response.json())["session_id"]
        for body in (first, second):
            async with http.post(f"/v1/sessions/{session}/step", data=body[:cut]) as response:
                await check(response)
        async with http.delete(f"/v1/sessions/{session}") as response:
            assert response.status == 200


async def stream_calls(url: str, calls: list[tuple[str, bytes]]) -> set[tuple[str, int]]:
    """(call, status) of calls that name a session which is open. Binary frames, as a text frame that is no UTF-8 ends a
    WebSocket by its own rules.
    """
    seen = set()
    async with aiohttp.ClientSession(url) as http, http.ws_connect("/v1/stream") as socket:
        await socket.send_json({"id": "open", "call": "create", "env": "still"})
        session = json.loads((await socket.receive(timeout=20)).data)["session_id"]
        for number, (name, message) in enumerate(calls):
            known = f'{{"id": {number}, "call": "{name}", "session_id": "{session}"'.encode()
            rest = b", " + message[1:] if message[1:] != b"}" else b"}"
            await socket.send_bytes(known + rest if name and message.startswith(b"{") else message)
            reply = json.loads((await socket.receive(timeout=20)).data)
            assert reply["status"] < 500, reply
            seen.add((name, reply["status"]))
        await socket.send_json({"id": "close", "call": "close", "session_id": session})
        await socket.receive(timeout=20)
    return seen


def test_the_stream(env_server: str) -> None:
    names = ["step", "step", "create", "heartbeat", "image", "tasks", "envs", "close"]
    sane = st.sampled_from([encoded({"index": index, "action": action}) for index in (0, 1) for action in "ab"])
    call = st.tuples(st.sampled_from(names), sane | stepping.map(encoded) | opening.map(encoded) | broken)
    seen: set[tuple[str, int]] = set()

    @settings(FEW, derandomize=True)
    @given(st.lists(call | st.tuples(st.just(""), st.binary(max_size=10)), max_size=6))
    def answered(calls: list[tuple[str, bytes]]) -> None:
        seen.update(asyncio.run(stream_calls(env_server, calls)))

    answered()
    assert {("step", 200), ("step", 409), ("step", 422), ("heartbeat", 200), ("close", 200)} <= seen, seen


@FEW
@given(path=st.sampled_from(["/v1/reward", "/get_reward"]), body=rewarding.map(encoded) | broken)
async def test_rewards(reward_server: str, path: str, body: bytes) -> None:
    await post(reward_server, path, body)


POLICY = {
    "/v1/chat/completions": with_keys(**CHAT),
    "/v1/responses": with_keys(**RESPONSES),
    "/v1/messages": with_keys(**MESSAGES),
    "/v1/messages/count_tokens": with_keys(**MESSAGES),
    "/tokenize": with_keys(prompt="p", messages=CHAT["messages"], tools=CHAT["tools"]),
    "/v1/rollouts/self/reward": with_keys(reward=1.0, score=0.5, metrics={"m": 1}),
}


@settings(FEW, max_examples=20)
@given(data=st.data())
async def test_the_policy(policy_server: tuple[str, str], data: Any) -> None:
    url, key = policy_server
    async with aiohttp.ClientSession(url, headers={"x-api-key": key}, timeout=aiohttp.ClientTimeout(20)) as http:
        async with http.post("/v1/chat/completions", json={"messages": CHAT["messages"]}) as response:
            assert response.status == 200
        for path, bodies in POLICY.items():
            body = data.draw(bodies.map(encoded) | broken)
            async with http.post(path, data=body) as response:
                said = await response.text()
                assert response.status < 500, (path, body, said)
                assert response.status == 200 or json.loads(said)["error"]["message"]


ordering = with_keys(
    episode_id="e",
    attempt=0,
    task={"id": "t", "label": 1.0},
    policy={"base_url": "http://a/v1", "anthropic_base_url": "http://a", "api_key": "k", "model": "m"},
    limits={"episode_timeout_s": 5},
    idempotency_key="i",
)


@FEW
@given(
    body=ordering.map(encoded) | broken,
    label=junk,
    number=st.integers(0, 10**6),
    wait=st.sampled_from(["", "?wait_s=0.1", "?wait_s=1e999", "?wait_s=nan", "?attempt=x"]),
)
async def test_an_agent(agent_server: str, body: bytes, label: Any, number: int, wait: str) -> None:
    """The agent returns its task's label: an order below 500, an outcome that is one or the agent's error."""
    order = {"episode_id": f"e{number}", "attempt": 0, "idempotency_key": "i", "limits": {}}
    policy = {"base_url": "http://a/v1", "anthropic_base_url": "http://a", "api_key": "k", "model": "m"}
    async with aiohttp.ClientSession(agent_server, timeout=aiohttp.ClientTimeout(20)) as http:
        async with http.post(f"/v1/episodes{wait}", data=body) as response:
            await check(response)
        whole = {**order, "policy": policy, "task": {"id": "t", "label": label}}
        async with http.post("/v1/episodes?wait_s=10", data=encoded(whole)) as response:
            said = await response.json()
            assert response.status < 500 or said["error"]["class"] == "AgentError", said


PATHS = ["/v1/envs", "/v1/envs/still/tasks", "/v1/sessions", "/v1/sessions/x/step", "/v1/sessions/x", "/v1/images/x"]


@FEW
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    path=st.sampled_from(PATHS),
    query=st.dictionaries(st.sampled_from(["split", "offset", "limit"]), st.text("0123456789-.eé\0", max_size=30)),
    headers=st.dictionaries(st.sampled_from(["Content-Type", "Accept", "X-Any"]), st.text("abc/;=*é", max_size=10)),
)
async def test_methods_queries_and_headers(
    env_server: str, method: str, path: str, query: dict[str, str], headers: dict[str, str]
) -> None:
    timeout = aiohttp.ClientTimeout(20)
    async with (
        aiohttp.ClientSession(env_server, timeout=timeout) as http,
        http.request(method, path, params=query, headers=headers) as response,
    ):
        await check(response)
