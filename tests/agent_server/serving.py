"""Envs to serve, and a small client that speaks the protocol by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.env_service import EnvLimits
from agentrl.agent_server.listen import bind, listening

from agentrl import Env, Image, Task, Text


class Counting(Env):
    """Counts its steps, and on which thread each call ran."""

    max_turns = 5
    made: list[Counting] = []

    @classmethod
    def tasks(cls, split: str = "train") -> Iterable[Task]:
        if split == "stream":
            return (Task(f"s-{i}") for i in itertools.count())
        if split not in ("train", "test"):
            raise ValueError(f"no split {split}")
        return [Task(f"{split}-{i}", f"prompt {i}", {"n": i}) for i in range(7 if split == "train" else 2)]

    def __init__(self) -> None:
        self.steps = 0
        self.closed = 0
        self.threads = {threading.get_ident()}
        type(self).made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.threads.add(threading.get_ident())
        self.reset_options = options
        return f"{self.task.id} {self.task.label} {seed}", {"score": 0.5}

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        if str(action) == "slow":
            time.sleep(0.3)
        if str(action) == "raise":
            raise ValueError("broken on purpose")
        if str(action) == "hang":
            time.sleep(1.5)
        self.steps += 1
        reward = {"nan": float("nan"), "inf": np.inf, "none": None, "text": "0.5"}.get(str(action), np.float32(0.25))
        info = {"metrics": {"seen": np.arange(2)}, "text": str(action)}
        return f"step {self.steps}: {action}", reward, self.steps >= self.max_turns, np.bool_(False), info

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Pictures(Env):
    """An async env that shows one picture again and again, beside a new one."""

    max_turns = 3

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        self.turn = 0
        return [_square(0), Text("look")], {}

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        self.turn += 1
        return [_square(0), _square(self.turn)], 1.0, self.turn == 3, False, {}


def _square(shade: int) -> Image:
    from PIL import Image as PILImage

    return Image(PILImage.new("RGB", (4, 4), (shade, 0, 0)))


@dataclass
class Caller:
    """Calls of the env server; each gives (status, reply)."""

    http: aiohttp.ClientSession
    url: str

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        data = {} if body is None else {"json": body}
        async with self.http.request(method, path, **data, **options) as response:
            return response.status, await response.json()

    async def open(self, env: str = "counting", **body: Any) -> Any:
        status, reply = await self.call("POST", "/v1/sessions", {"env": env, "seed": 0, **body})
        assert status == 200, reply
        return reply

    async def step(self, session: str, index: int, action: Any = "a") -> tuple[int, Any]:
        return await self.call("POST", f"/v1/sessions/{session}/step", {"index": index, "action": action})


class Stream:
    """The WebSocket, one call at a time or many."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.sent = 0

    async def send(self, call: str, **body: Any) -> int:
        self.sent += 1
        await self.socket.send_json({"id": self.sent, "call": call, **body})
        return self.sent

    async def receive(self) -> Any:
        return json.loads((await self.socket.receive(timeout=20)).data)

    async def ask(self, call: str, **body: Any) -> Any:
        await self.send(call, **body)
        return await self.receive()


@asynccontextmanager
async def serving(limits: EnvLimits = EnvLimits(), **options: Any) -> AsyncIterator[Caller]:
    """A server with `counting` and `pictures` on a free port."""
    Counting.made.clear()
    app = env_app(options.pop("envs", {"counting": Counting, "pictures": Pictures}), limits=limits, **options)
    async with listening(app, bind("127.0.0.1", 0)) as url, aiohttp.ClientSession(url) as http:
        yield Caller(http, url)


async def until(condition: Any) -> None:
    """Wait for what is about to hold; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
