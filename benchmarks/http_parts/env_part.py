"""The env server beside bare echo servers: FastAPI over HTTP, and a WebSocket that decodes and encodes the same JSON with the
same library. One connection serves all sessions of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pydantic_core
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.http import Bounds
from agentrl.agent_server.listen import bind, serve_forever, url_of
from fastapi import FastAPI, WebSocket

from agentrl import Env

from .loads import TEXT, compare, http_step, rate, served, wires

SESSIONS = (1, 32, 256)
MANY = 2000


class Trivial(Env):
    """Does nothing, asynchronously."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return TEXT, {}

    async def step(self, action: Any) -> Any:
        return TEXT, 0.5, False, False, {}


class TrivialSync(Env):
    """Does nothing, on a thread of its own."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return TEXT, {}

    def step(self, action: Any) -> Any:
        return TEXT, 0.5, False, False, {}


def echo_app() -> FastAPI:
    """The two bare servers."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            await socket.send_text(pydantic_core.to_json(pydantic_core.from_json(message["text"])).decode())

    return app


def serve_env(port: Any) -> None:
    listener = bind("127.0.0.1", 0)
    port.send(url_of(listener))
    serve_forever(env_app({"trivial": Trivial, "sync": TrivialSync}), listener)


def serve_echo(port: Any) -> None:
    listener = bind("127.0.0.1", 0)
    port.send(url_of(listener))
    app = echo_app()
    app.state.bounds = Bounds()
    serve_forever(app, listener)


async def open_sessions(http: aiohttp.ClientSession, n: int, env: str = "trivial") -> list[str]:
    async def one() -> str:
        async with http.post("/v1/sessions", json={"env": env, "seed": 0}) as response:
            return (await response.json())["session_id"]

    return await asyncio.gather(*(one() for _ in range(n)))


async def measure(seconds: float, sizes: Sequence[int] = SESSIONS) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    connectors = [aiohttp.TCPConnector(limit=0) for _ in range(2)]
    async with (
        served(serve_env) as (env, pid),
        served(serve_echo) as (echo, bare_pid),
        aiohttp.ClientSession(env, connector=connectors[0]) as ours,
        aiohttp.ClientSession(echo, connector=connectors[1]) as bare,
    ):
        pids = (pid, bare_pid)
        for n in sizes:
            ids = await open_sessions(ours, n)
            step = http_step(ours, n, [f"/v1/sessions/{session}/step" for session in ids].__getitem__)
            other = http_step(bare, n, lambda number: "/echo")
            results.append(await compare("http", n, seconds, step, other, pids))
        for n, kind in [*((n, "trivial") for n in sizes), (32, "sync")]:
            ids = await open_sessions(ours, n, kind)
            async with wires([f"{env}/v1/stream", f"{echo}/ws"], [ids, ids]) as (wire, bare_wire):
                what = "threads" if kind == "sync" else "stream"
                results.append(await compare(what, n, seconds, wire.steps(), bare_wire.steps(), pids))
        ids = await open_sessions(ours, MANY)
        async with wires([f"{env}/v1/stream"], [ids]) as (wire,):
            many, _ = await rate(MANY, seconds, wire.steps(), pid)
            print(f"{MANY} sessions on one server: {many:.0f} steps/s")
    return {"compared": results, "many": {"sessions": MANY, "steps_per_s": round(many)}}
