"""What the parts share: a server in a process of its own, clients that step as fast as they are answered, and comparisons.

Two servers are measured in turns, several rounds; a ratio is the median over the rounds. `cpu_ratio` compares the processor time
that the servers take for a step, which other processes on the machine disturb less.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
import pydantic_core

TEXT = "what is 17 + 25? think first, then answer with one number. " * 4
ROUNDS = 3
Pids = tuple[int, int]


@asynccontextmanager
async def served(serve: Callable[..., None], *given: Any) -> AsyncIterator[tuple[str, int]]:
    """`serve(pipe, …)` in a process, which sends its URL through the pipe; (URL, process id)."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *given), daemon=True)
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
        answered = self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_str(step_call(self.sessions[number], number, index))
        await answered


def step_call(session: str, number: int, index: int) -> str:
    """A step on the stream."""
    call = {"id": number, "call": "step", "session_id": session, "index": index, "action": TEXT}
    return pydantic_core.to_json(call).decode()


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
