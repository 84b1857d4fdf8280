"""The env server's WebSocket: the calls of the routes, many at once, answered as they are done.

    {"id", "call", "session_id"?, …body} -> {"id", "status", …reply}

Calls: `envs`, `tasks`, `create`, `step`, `heartbeat`, `close`, `image` (whose reply holds `data`, base64). Losing the
connection loses no session and no step that has begun.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from agentrl import wire
from agentrl.schemas import OpenSession, StepRequest

from .env_play import Answer, as_answer
from .env_service import EnvService
from .http import ApiError, Bounds, parse_json, validated

MAX_IN_FLIGHT = 8192
MAX_UNSENT = 16 * 2**20
"""Bytes of replies that wait to be sent; above, no further call is read."""
LARGE, MAX_LARGE = ("envs", "tasks", "image"), 64
"""Calls whose replies are large for what was asked, as those of a step asked for again are, and how many of them may be
under way before no further call is read.
"""


class TasksCall(BaseModel):
    """What a `tasks` call says; the route has it in the query."""

    env: str
    split: str = Field("train", max_length=100)
    offset: int = Field(0, ge=0, lt=2**53)
    limit: int = Field(100, ge=1, le=1000)


class StreamEndpoint:
    """The WebSocket route as bare ASGI; serves a connection until it is gone."""

    def __init__(self, service: EnvService, bounds: Bounds) -> None:
        self.service = service
        self.bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept"})
        stream = _Stream(self.service, self.bounds)
        writer = asyncio.ensure_future(stream.write(send))
        try:
            while (message := await receive())["type"] == "websocket.receive":
                stream.take(message.get("text") or message.get("bytes") or "")
                await stream.has_room.wait()
        finally:
            writer.cancel()
            stream.drop()


class _Stream:
    """One connection's calls. Replies go through one writer, so frames are never written at the same time. While too much
    is unsent there is no room for another call.
    """

    def __init__(self, service: EnvService, bounds: Bounds) -> None:
        self.service = service
        self.bounds = bounds
        self._replies: deque[str] = deque()
        self._some = asyncio.Event()
        self._unsent = self._large = 0
        self._lost = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._own: set[asyncio.Future[Answer]] = set()
        self._running: set[asyncio.Future[Answer]] = set()
        self._in_flight = 0
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {
            "envs": self._envs,
            "tasks": self._tasks,
            "create": self._create,
            "heartbeat": self._heartbeat,
            "close": self._close,
            "delete": self._close,
            "image": self._image,
        }

    async def write(self, send: Send) -> None:
        """Send what is there, for as long as the connection lasts; then there is room for what tells its end."""
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                while self._replies:
                    reply = self._replies.popleft()
                    await send({"type": "websocket.send", "text": reply})
                    self._unsent -= len(reply)
                    self._see_room()
        finally:
            self._lost = True
            self._see_room()

    def _see_room(self) -> None:
        if self._lost or (self._unsent <= MAX_UNSENT and self._large < MAX_LARGE):
            self.has_room.set()
        else:
            self.has_room.clear()

    def drop(self) -> None:
        """The connection is gone. What waits here for an answer ends; what makes the answer goes on."""
        for call in self._own:
            call.cancel()

    def take(self, raw: str | bytes) -> None:
        """Begin one call."""
        number: Any = None
        try:
            call = parse_json(raw, self.bounds)
            if not isinstance(call, dict):
                raise ApiError(400, "a call is a JSON object with id and call")
            number = call.get("id")
            if not isinstance(number, int | str):
                number = None
                raise ApiError(422, "a call's id is a number or a text", kind="Invalid")
            self._begin(number, call)
        except ApiError as error:
            self._reply(number, as_answer(error))

    def _begin(self, number: int | str, call: dict[str, Any]) -> None:
        name = call.get("call")
        if self._in_flight >= MAX_IN_FLIGHT:
            raise ApiError(429, "too many calls at once on this connection", kind="Full", retryable=True)
        if name == "step":
            answer: asyncio.Future[Answer] = self.service.begin_step(_session(call), validated(StepRequest, call))
        elif isinstance(name, str) and name in self._calls:
            answer = asyncio.ensure_future(self._calls[name](call))
            self._own.add(answer)
        else:
            known = ", ".join(("step", *self._calls))
            raise ApiError(422, f"there is no call {str(name)[:40]!r}: {known}", kind="Invalid")
        large = name in LARGE or answer in self._running
        self._running.add(answer)
        self._in_flight += 1
        self._large += large
        self._see_room()
        if answer.done():
            self._done(number, answer, large)  # now, so that repeats of one step fill the room before the next is read
        else:
            answer.add_done_callback(lambda done: self._done(number, done, large))

    def _done(self, number: int | str, done: asyncio.Future[Answer], large: bool) -> None:
        self._in_flight -= 1
        self._large -= large
        self._own.discard(done)
        self._running.discard(done)
        if done.cancelled():
            error: BaseException | None = ApiError(404, "the session was closed", kind="UnknownSession")
        else:
            error = done.exception()
        if error is None:
            self._reply(number, done.result())
        elif isinstance(error, ApiError):
            self._reply(number, as_answer(error))
        else:
            self._reply(number, as_answer(ApiError(500, f"{type(error).__name__} in the server", kind="ServerError")))

    def _reply(self, number: Any, answer: Answer) -> None:
        head = wire.dump({"id": number, "status": answer.status})[:-1]
        rest = b"}" if answer.body == b"{}" else b"," + answer.body[1:]
        reply = (head + rest).decode()
        self._replies.append(reply)
        self._unsent += len(reply)
        self._some.set()
        self._see_room()

    async def _envs(self, call: dict[str, Any]) -> Answer:
        return self.service.envs()

    async def _tasks(self, call: dict[str, Any]) -> Answer:
        asked = validated(TasksCall, call)
        return await self.service.tasks(asked.env, asked.split, asked.offset, asked.limit)

    async def _create(self, call: dict[str, Any]) -> Answer:
        return await self.service.open(validated(OpenSession, call))

    async def _heartbeat(self, call: dict[str, Any]) -> Answer:
        return self.service.heartbeat(_session(call))

    async def _close(self, call: dict[str, Any]) -> Answer:
        return await self.service.close(_session(call))

    async def _image(self, call: dict[str, Any]) -> Answer:
        sha = call.get("sha256")
        png = self.service.image(sha if isinstance(sha, str) else "")
        return Answer(200, wire.dump({"sha256": sha, "data": base64.b64encode(png).decode()}))


def _session(call: dict[str, Any]) -> str:
    session_id = call.get("session_id")
    if not isinstance(session_id, str):
        raise ApiError(422, "session_id is missing", kind="Invalid")
    return session_id
