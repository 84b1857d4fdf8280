"""Steps per second of the env server, beside a bare echo server in the same run.

    python benchmarks/http_env.py [--seconds 4] [--out benchmarks/results/http_env.json]

One server process and one client process. The env is async and does nothing; the echo servers are FastAPI and a Starlette
WebSocket that decode and encode the same JSON with the same library. Each pair is measured in turns, several rounds; a
ratio is the median over the rounds. The stream and its echo use one connection for all sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pydantic_core
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.listen import bind, serve_forever, url_of
from fastapi import FastAPI, WebSocket

from agentrl import Env

TEXT = "what is 17 + 25? think first, then answer with one number. " * 4
SESSIONS = (1, 32, 256)
MANY = 2000
ROUNDS = 3
Pids = tuple[int, int]


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


def serve(kind: str, port: Any) -> None:
    """The server process."""
    listener = bind("127.0.0.1", 0)
    port.send(url_of(listener))
    app = env_app({"trivial": Trivial, "sync": TrivialSync}) if kind == "env" else echo_app()
    if kind == "echo":
        from agentrl.agent_server.http import Bounds

        app.state.bounds = Bounds()
    serve_forever(app, listener)


@asynccontextmanager
async def served(kind: str) -> AsyncIterator[tuple[str, int]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, theirs), daemon=True)
    process.start()
    url = await asyncio.to_thread(ours.recv)
    try:
        async with aiohttp.ClientSession(url) as http:
            while True:
                try:
                    async with http.get("/openapi.json"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        assert process.pid is not None
        yield url, process.pid
    finally:
        process.terminate()
        process.join(10)


async def rate(sessions: int, seconds: float, step: Step, pid: int) -> tuple[float, float]:
    """(steps per second, CPU microseconds of the server a step) when every session takes its next step as soon as the last
    was answered.
    """
    done = 0
    end = time.perf_counter() + seconds

    async def one(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await step.take(number, counts[number])
            counts[number] += 1
            done += 1

    counts = step.counts
    before, began = _cpu(pid), time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(sessions)))
    return done / (time.perf_counter() - began), (_cpu(pid) - before) / done * 1e6


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@dataclass
class Step:
    """Takes a session's next step; `counts` are the steps each session has taken."""

    take: Callable[[int, int], Awaitable[None]]
    counts: list[int]


async def open_sessions(http: aiohttp.ClientSession, n: int, env: str = "trivial") -> list[str]:
    async def one() -> str:
        async with http.post("/v1/sessions", json={"env": env, "seed": 0}) as response:
            return (await response.json())["session_id"]

    return await asyncio.gather(*(one() for _ in range(n)))


def http_step(http: aiohttp.ClientSession, n: int, path: Callable[[int], str]) -> Step:
    headers = {"Content-Type": "application/json"}

    async def step(number: int, index: int) -> None:
        body = pydantic_core.to_json({"index": index, "action": TEXT})
        async with http.post(path(number), data=body, headers=headers) as response:
            content = await response.read()
            assert response.status == 200, content

    return Step(step, [0] * n)


class Wire:
    """Calls on one WebSocket, matched by id."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, sessions: list[str]) -> None:
        self.socket = socket
        self.sessions = sessions
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            reply = pydantic_core.from_json(message.data)
            assert reply.get("status", 200) == 200, reply
            self.waiting.pop(reply["id"]).set_result(None)

    def steps(self) -> Step:
        return Step(self.step, [0] * len(self.sessions))

    async def step(self, number: int, index: int) -> None:
        call = {"id": number, "call": "step", "session_id": self.sessions[number], "index": index, "action": TEXT}
        answered = self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_str(pydantic_core.to_json(call).decode())
        await answered


@asynccontextmanager
async def wires(urls: list[str], sessions: list[list[str]]) -> AsyncIterator[list[Wire]]:
    async with aiohttp.ClientSession() as http:
        found = [Wire(await http.ws_connect(url), ids) for url, ids in zip(urls, sessions, strict=True)]
        yield found
        for wire in found:
            wire.reader.cancel()
            await wire.socket.close()


async def compare(what: str, sessions: int, seconds: float, ours: Step, bare: Step, pids: Pids) -> dict[str, Any]:
    """Rounds of both in turns; the median of each and of the ratios. `cpu_ratio` is bare over ours: other processes on the
    machine disturb it less than the rates.
    """
    rounds = [
        (await rate(sessions, seconds, ours, pids[0]), await rate(sessions, seconds, bare, pids[1]))
        for _ in range(ROUNDS)
    ]
    result = {
        "what": what,
        "sessions": sessions,
        "steps_per_s": round(statistics.median(one[0] for one, _ in rounds)),
        "bare_per_s": round(statistics.median(other[0] for _, other in rounds)),
        "ratio": round(statistics.median(one[0] / other[0] for one, other in rounds), 3),
        "cpu_us": round(statistics.median(one[1] for one, _ in rounds), 1),
        "bare_cpu_us": round(statistics.median(other[1] for _, other in rounds), 1),
        "cpu_ratio": round(statistics.median(other[1] / one[1] for one, other in rounds), 3),
    }
    print(
        f"{what:<8} {sessions:>5} sessions: {result['steps_per_s']:>7} steps/s, bare {result['bare_per_s']:>7}, ratio "
        f"{result['ratio']:.2f}; server CPU {result['cpu_us']:.0f} us a step, bare {result['bare_cpu_us']:.0f}, ratio "
        f"{result['cpu_ratio']:.2f}"
    )
    return result


async def measure(seconds: float) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    connectors = [aiohttp.TCPConnector(limit=0) for _ in range(2)]
    async with (
        served("env") as (env, pid),
        served("echo") as (echo, bare_pid),
        aiohttp.ClientSession(env, connector=connectors[0]) as ours,
        aiohttp.ClientSession(echo, connector=connectors[1]) as bare,
    ):
        pids = (pid, bare_pid)
        for n in SESSIONS:
            ids = await open_sessions(ours, n)
            step = http_step(ours, n, lambda number, ids=ids: f"/v1/sessions/{ids[number]}/step")
            other = http_step(bare, n, lambda number: "/echo")
            results.append(await compare("http", n, seconds, step, other, pids))
        for n in SESSIONS:
            ids = await open_sessions(ours, n)
            async with wires([f"{env}/v1/stream", f"{echo}/ws"], [ids, ids]) as (wire, bare_wire):
                results.append(await compare("stream", n, seconds, wire.steps(), bare_wire.steps(), pids))
        ids = await open_sessions(ours, 32, "sync")
        async with wires([f"{env}/v1/stream", f"{echo}/ws"], [ids, ids]) as (wire, bare_wire):
            results.append(await compare("threads", 32, seconds, wire.steps(), bare_wire.steps(), pids))
        ids = await open_sessions(ours, MANY)
        async with wires([f"{env}/v1/stream"], [ids]) as (wire,):
            many, _ = await rate(MANY, seconds, wire.steps(), pid)
            print(f"{MANY} sessions on one server: {many:.0f} steps/s")
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "payload_bytes": len(TEXT),
        "compared": results,
        "many": {"sessions": MANY, "steps_per_s": round(many)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--out", default=str(Path(__file__).with_name("results") / "http_env.json"))
    options = parser.parse_args()
    result = asyncio.run(measure(options.seconds))
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
