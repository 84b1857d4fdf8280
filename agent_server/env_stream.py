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
from agentrl.schemas import MAX_INDEX, OpenSession, StepRequest

from .env_play import Answer, as_answer
from .env_service import EnvService
from .http import ApiError, Bounds, parse_json, validated

MAX_IN_FLIGHT = 8192
AT_ONCE = 32
"""Calls of a burst that are read before what they began goes on: the first are answered while the last are read."""
MAX_UNSENT = 16 * 2**20
"""Bytes of replies that wait to be sent; above, no further call is read."""
LARGE, MAX_LARGE = ("envs", "tasks", "image"), 64
"""Calls whose replies are large for what was asked, as those of a step asked for again are, and how many of them may be
under way before no further call is read.
"""


CLOSED = as_answer(ApiError(404, "the session was closed", kind="UnknownSession"))


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
        stream = _Stream(self.service, self.bounds, send)
        taken = 0
        try:
            while (message := await receive())["type"] == "websocket.receive":
                await stream.take(message.get("text") or message.get("bytes") or "")
                await stream.has_room.wait()
                taken += 1
                if taken % AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            stream.drop()


class _Stream:
    """One connection's calls. Each is answered by the task that served it; while one writes, it writes what others have to
    say too, so that frames are never written at the same time. While too much is unsent there is no room for another call.
    """

    def __init__(self, service: EnvService, bounds: Bounds, send: Send) -> None:
        self.service = service
        self.bounds = bounds
        self._send = send
        self._replies: deque[str] = deque()
        self._unsent = self._large = self._in_flight = 0
        self._lost = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._own: set[asyncio.Task[None]] = set()
        self._writing = False
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {
            "envs": self._envs,
            "tasks": self._tasks,
            "create": self._create,
            "heartbeat": self._heartbeat,
            "close": self._close,
            "delete": self._close,
            "image": self._image,
        }

    def drop(self) -> None:
        """The connection is gone. What waits here for an answer ends; what makes the answer goes on."""
        self._lost = True
        self._replies.clear()
        for call in self._own:
            call.cancel()

    async def take(self, raw: str | bytes) -> None:
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
            await self._reply(number, as_answer(error))

    def _begin(self, number: int | str, call: dict[str, Any]) -> None:
        name = call.get("call")
        if self._in_flight >= MAX_IN_FLIGHT:
            raise ApiError(429, "too many calls at once on this connection", kind="Full", retryable=True)
        if name == "step":
            index, action = _step(call)
            answer, fresh = self.service.begin_step(
                _session(call), index, action, lambda done: self._stepped(number, done)
            )
            if fresh:
                self._in_flight += 1
            else:
                self._serve(number, lambda: asyncio.shield(answer), large=True)
        elif isinstance(name, str) and name in self._calls:
            self._serve(number, lambda: self._calls[name](call), large=name in LARGE)
        else:
            known = ", ".join(("step", *self._calls))
            raise ApiError(422, f"there is no call {str(name)[:40]!r}: {known}", kind="Invalid")

    def _serve(self, number: int | str, begin: Callable[[], Awaitable[Answer]], large: bool) -> None:
        self._in_flight += 1
        self._large += large
        self._see_room()
        task = asyncio.ensure_future(self._served(number, begin, large))
        self._own.add(task)
        task.add_done_callback(self._own.discard)

    async def _served(self, number: int | str, begin: Callable[[], Awaitable[Answer]], large: bool) -> None:
        try:
            answer = await begin()
        except Exception as error:
            answer = _failure(error)
        except asyncio.CancelledError:
            if self._lost:
                raise
            answer = CLOSED
        finally:
            self._large -= large
            self._in_flight -= 1
        await self._reply(number, answer)

    async def _stepped(self, number: int | str, done: asyncio.Future[Answer]) -> None:
        self._in_flight -= 1
        if done.cancelled():
            answer = CLOSED
        else:
            error = done.exception()
            answer = done.result() if error is None else _failure(error)
        await self._reply(number, answer)

    async def _reply(self, number: Any, answer: Answer) -> None:
        if self._lost:
            return
        reply = _framed(number, answer)
        self._replies.append(reply)
        self._unsent += len(reply)
        if self._writing:
            self._see_room()
        else:
            await self._write()

    async def _write(self) -> None:
        """Send what there is, and what comes meanwhile."""
        self._writing = True
        try:
            while self._replies and not self._lost:
                reply = self._replies.popleft()
                await self._send({"type": "websocket.send", "text": reply})
                self._unsent -= len(reply)
                if not self.has_room.is_set():
                    self._see_room()
        except Exception:  # the connection is gone: `receive` tells its end
            self._lost = True
        finally:
            self._writing = False
            self._see_room()

    def _see_room(self) -> None:
        if self._lost or (self._unsent <= MAX_UNSENT and self._large < MAX_LARGE):
            self.has_room.set()
        else:
            self.has_room.clear()

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


def _framed(number: Any, answer: Answer) -> str:
    head = b'{"id":%d,"status":%d' % (number, answer.status) if type(number) is int else _head(number, answer.status)
    return (head + (b"}" if answer.body == b"{}" else b"," + answer.body[1:])).decode()


def _head(number: Any, status: int) -> bytes:
    return wire.dump({"id": number, "status": status})[:-1]


def _failure(error: BaseException) -> Answer:
    if isinstance(error, ApiError):
        return as_answer(error)
    return as_answer(ApiError(500, f"{type(error).__name__} in the server", kind="ServerError"))


def _step(call: dict[str, Any]) -> tuple[int, Any]:
    """(index, action); the model has the word on all but the plainest form, which it would take longer to read than JSON."""
    index, action = call.get("index"), call.get("action")
    if type(action) is str and type(index) is int and 0 <= index < MAX_INDEX:
        return index, action
    request = validated(StepRequest, call)
    return request.index, request.form


def _session(call: dict[str, Any]) -> str:
    session_id = call.get("session_id")
    if not isinstance(session_id, str):
        raise ApiError(422, "session_id is missing", kind="Invalid")
    return session_id
