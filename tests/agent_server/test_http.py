"""The guard of every server: tokens, bounds, and errors in one shape, against a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agentrl.agent_server.connection import STATE
from agentrl.agent_server.http import Bounds, bearer, json_response, make_app, read_json
from agentrl.agent_server.listen import bind, check_bind, listening, read_token
from fastapi import Request, Response, WebSocket
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.json_bounds import json_fault

TOKEN = "correct-horse"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


def echo_app(token: str | None) -> Any:
    app = make_app("echo", authorize=bearer(token), bounds=Bounds(body=1000, depth=5))

    @app.post("/echo")
    async def echo(request: Request) -> Any:
        return json_response(await read_json(request))

    @app.post("/typed")
    async def typed(n: int) -> int:
        return n

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret detail")

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    return app


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with listening(echo_app(TOKEN), bind("127.0.0.1", 0)) as address:
        yield address


async def error(response: aiohttp.ClientResponse) -> tuple[int, str]:
    """(status, class) of an answer in the shape of errors."""
    body = (await response.json())["error"]
    assert set(body) == {"class", "message", "retryable"}
    return response.status, body["class"]


async def test_only_health_answers_without_the_token(url: str) -> None:
    async with aiohttp.ClientSession(url) as client:
        async with client.get("/health") as health:
            assert (health.status, await health.text()) == (200, "ok")
        for path in ("/metrics", "/openapi.json", "/nothing"):
            async with client.get(path) as refused:
                assert await error(refused) == (401, "Unauthorized")
        for wrong in ("Bearer", "Bearer x", "Basic correct-horse", f"Bearer {TOKEN}x", "Bearer correct-hörse"):
            async with client.get("/metrics", headers={"Authorization": wrong}) as refused:
                assert refused.status == 401
        async with client.get("/metrics", headers=AUTH) as metrics:
            assert 'agentrl_http_requests_total{status="401"} 8.0' in await metrics.text()
        with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
            await client.ws_connect("/ws")
        assert raised.value.status == 401
        async with client.ws_connect("/ws", headers=AUTH) as socket:
            await socket.send_str("hello")
            assert (await socket.receive()).data == "hello"


async def test_errors_have_one_shape(url: str) -> None:
    async with aiohttp.ClientSession(url, headers=AUTH) as client:
        async with client.get("/nothing") as response:
            assert await error(response) == (404, "NotFound")
        async with client.delete("/echo") as response:
            assert await error(response) == (405, "MethodNotAllowed")
        async with client.post("/typed?n=x") as response:
            assert await error(response) == (422, "Invalid")
        async with client.get("/broken") as response:
            assert await error(response) == (500, "ServerError")
            assert "secret" not in await response.text()
        for body in (b"\xff", b"{", b"", b'"' + b"\\ud800" + b'"', b"[" * 6 + b"]" * 6, b"1" * 900 + b"e"):
            async with client.post("/echo", data=body) as response:
                assert await error(response) == (400, "BadRequest")


async def test_a_body_has_a_bound_whether_its_length_is_said_or_not(url: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"1" * 300

    async with aiohttp.ClientSession(url, headers=AUTH) as client:
        for body in (b"1" * 1001, pieces()):
            async with client.post("/echo", data=body) as response:
                assert await error(response) == (413, "TooLarge")
        async with client.post("/echo", data=b"[" + b"1," * 400 + b"1]") as response:
            assert response.status == 200


async def test_small_answers_are_not_held_back() -> None:
    """Nagle's algorithm is off on the connections of a listener that is made here."""
    app = echo_app(None)

    @app.get("/nodelay")
    async def nodelay(request: Request) -> bool:
        transport = request.scope["state"][STATE]._protocol.transport
        return bool(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async with (
        listening(app, bind("127.0.0.1", 0)) as url,
        aiohttp.ClientSession() as http,
        http.get(f"{url}/nodelay") as response,
    ):
        assert await response.json() is True


async def test_without_a_token_no_web_page_may_ask() -> None:
    async with listening(echo_app(None), bind("127.0.0.1", 0)) as url, aiohttp.ClientSession(url) as client:
        async with client.post("/echo", data=b"1") as response:
            assert response.status == 200
        async with client.post("/echo", data=b"1", headers={"Origin": "http://elsewhere.example"}) as response:
            assert response.status == 401


def test_another_address_than_loopback_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="--token-file"):
            check_bind(host, None)
        check_bind(host, "token")
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_bind(host, None)


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert read_token(str(file), "--token-file") == "abc"
    for content in ("", "two words", "hörse"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="--token-file") as raised:
            read_token(str(file), "--token-file")
        assert not content or content not in str(raised.value)
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        read_token(str(tmp_path / "none"), "--token-file")


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


leaves = st.none() | st.integers() | st.text()
nested = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(nested, st.integers(0, 4))
def test_depth_counts_brackets_outside_of_strings(value: Any, allowed: int) -> None:
    assert (json_fault(json.dumps(value).encode(), allowed) is not None) == (depth(value) > allowed)


@given(nested, st.integers(1, 12))
def test_values_count_outside_of_strings(value: Any, allowed: int) -> None:
    """At least every leaf and container that is not alone counts; of a text nothing but itself."""
    text = json.dumps(value).encode()
    found = json_fault(text, 100, allowed)
    assert (found is not None) == (tokens(value) > allowed)


def tokens(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(1 + tokens(inner) for inner in value.values())
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(tokens, value))
    return int(isinstance(value, str))


async def test_a_legal_body_of_too_many_values_is_refused_at_once() -> None:
    """Eight million arrays in 24 MB: their reading would take a server ten seconds and gigabytes."""
    app = make_app("test", authorize=bearer(None))

    @app.post("/read")
    async def read(request: Request) -> Response:
        await read_json(request)
        return Response()

    async with listening(app, bind("127.0.0.1", 0)) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/read", data=b"[" + b"[]," * 8_000_000 + b"[]]") as response:
            assert response.status == 400 and "values" in await response.text()
        async with http.post("/read", data=b"[" + b'"[,]", ' * 100_000 + b"1]") as response:
            assert response.status == 200
