"""The env server beside OpenEnv's: the same payload, an async env that does nothing, a WebSocket a session there and one
stream for all here, as each side's client does it. With one session both are asked the same way: a text is sent, and then
the next one read. OpenEnv is installed in a folder of its own:

    pip install --target DIR fastmcp && pip install --target DIR --no-deps openenv-core
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pydantic_core

from .env_part import SESSIONS, open_sessions, serve_env
from .loads import TEXT, Step, compare, served, step_call, wires

SERVER = Path(__file__).with_name("openenv_server.py")


@asynccontextmanager
async def openenv(folder: str) -> AsyncIterator[tuple[str, int]]:
    """(URL, process id)"""
    environment = {**os.environ, "PYTHONPATH": folder}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), TEXT, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise SystemExit(f"--openenv {folder}: OpenEnv's server did not start.")
        yield url, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def sockets(http: aiohttp.ClientSession, url: str, n: int) -> AsyncIterator[Step]:
    """n sessions of OpenEnv, reset."""
    opened = [await http.ws_connect(f"{url}/ws") for _ in range(n)]
    said = pydantic_core.to_json({"type": "step", "data": {"text": TEXT}}).decode()
    reset = pydantic_core.to_json({"type": "reset", "data": {}}).decode()

    async def ask(socket: aiohttp.ClientWebSocketResponse, text: str) -> None:
        await socket.send_str(text)
        reply = pydantic_core.from_json((await socket.receive()).data)
        assert reply["type"] == "observation", reply

    for socket in opened:
        await ask(socket, reset)
    yield Step(lambda number, index: ask(opened[number], said), [0] * n)
    for socket in opened:
        await socket.close()


@asynccontextmanager
async def streamed(http: aiohttp.ClientSession, url: str, sessions: list[str]) -> AsyncIterator[Step]:
    """Sessions of ours over one stream."""
    if len(sessions) > 1:
        async with wires([f"{url}/v1/stream"], [sessions]) as (wire,):
            yield wire.steps()
        return
    socket = await http.ws_connect(f"{url}/v1/stream")

    async def ask(number: int, index: int) -> None:
        await socket.send_str(step_call(sessions[number], number, index))
        reply = pydantic_core.from_json((await socket.receive()).data)
        assert reply["status"] == 200, reply

    yield Step(ask, [0])
    await socket.close()


async def measure(seconds: float, folder: str) -> dict[str, Any]:
    results = []
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        served(serve_env) as (env, pid),
        openenv(folder) as (other, other_pid),
        aiohttp.ClientSession(env) as ours,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        for n in SESSIONS:
            ids = await open_sessions(ours, n)
            async with streamed(http, env, ids) as step, sockets(http, other, n) as theirs:
                results.append(await compare("openenv", n, seconds, step, theirs, (pid, other_pid)))
    return {"compared": results}
