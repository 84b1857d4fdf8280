"""The env server's WebSocket: the calls of the routes, many at once, answered as they are done.

    {"id", "call", "session_id"?, …body} -> {"id", "status", …reply}

Calls: `envs`, `tasks`, `create`, `step`, `heartbeat`, `close`, `image` (whose reply holds `data`, base64). Losing the
connection loses no session and no step that has begun.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from agentrl import wire
from agentrl.schemas import MAX_INDEX, OpenSession, StepRequest

from .env_play import CLOSED, Answer, PlayedSession, as_answer, failure, recorded
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
        await _Stream(self.service, self.bounds, receive, send).serve()


class _Stream:
    """One connection's calls.

    A step that comes while no other call is under way is played by the task that read it, which is the fastest; should the step
    take time, another task reads on. Every other call has a task of its own. Whoever has an answer writes it; while one writes,
    it writes what others have to say too, so that frames are never written at the same time. While too much is unsent there is
    no room for another call.
    """

    def __init__(self, service: EnvService, bounds: Bounds, receive: Receive, send: Send) -> None:
        self.service = service
        self.bounds = bounds
        self._receive = receive
        self._send = send
        self._replies: deque[str] = deque()
        self._unsent = self._large = self._in_flight = self._taken = 0
        self._reading = self._watched = self._writing = False
        self._over = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._own: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {
            "envs": self._envs,
            "tasks": self._tasks,
            "create": self._create,
            "heartbeat": self._heartbeat,
            "close": self._close,
            "delete": self._close,
            "image": self._image,
        }

    async def serve(self) -> None:
        """Until the connection is gone."""
        try:
            self._look()  # tasks of its own, as a step outlives the connection
            await self._over.wait()
        finally:
            self._drop()

    async def _read(self) -> None:
        """Take calls, for as long as no other task has begun to read because this one was held up."""
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                step = self._take(message.get("text") or message.get("bytes") or "")
                if step is not None:
                    self._reading = False
                    self._watch()
                    await step
                    if self._reading or self._over.is_set():
                        return
                    if contextvars.copy_context() != self._context:  # an env has set a variable, for its own task
                        return self._look()
                    self._reading = True
                if not self._has_room.is_set():
                    await self._has_room.wait()
                self._taken += 1
                if self._taken % AT_ONCE == 0:
                    await asyncio.sleep(0)
        except BaseException:
            self._over.set()
            raise
        self._over.set()

    def _watch(self) -> None:
        """Look, as soon as the running task is held up, whether anybody reads."""
        if not self._watched:
            self._watched = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._watched = False
        if not self._reading and not self._over.is_set():
            self._reading = True
            self._keep(self._steps, self._read())

    def _keep(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, context=self._context.copy())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _drop(self) -> None:
        """The connection is gone. What waits here for an answer ends; what makes the answer goes on."""
        self._over.set()
        self._replies.clear()
        for call in self._own:
            call.cancel()

    def _take(self, raw: str | bytes) -> Coroutine[Any, Any, None] | None:
        """Begin one call; what is to be awaited here and now, if anything."""
        number: Any = None
        try:
            call = parse_json(raw, self.bounds)
            if not isinstance(call, dict):
                raise ApiError(400, "a call is a JSON object with id and call")
            number = call.get("id")
            if not isinstance(number, int | str):
                number = None
                raise ApiError(422, "a call's id is a number or a text", kind="Invalid")
            return self._begin(number, call)
        except ApiError as error:
            return self._reply(number, as_answer(error))

    def _begin(self, number: int | str, call: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        name = call.get("call")
        if self._in_flight >= MAX_IN_FLIGHT:
            raise ApiError(429, "too many calls at once on this connection", kind="Full", retryable=True)
        if name == "step":
            session, before = self.service.begin_step(_session(call), *_step(call))
            if before is None:
                self._in_flight += 1
                step = self._stepped(number, session)
                if self._in_flight == 1:
                    return step
                self._keep(self._steps, step)
            else:
                self._serve(number, lambda: recorded(before), large=True)
        elif isinstance(name, str) and name in self._calls:
            self._serve(number, lambda: self._calls[name](call), large=name in LARGE)
        else:
            known = ", ".join(("step", *self._calls))
            raise ApiError(422, f"there is no call {str(name)[:40]!r}: {known}", kind="Invalid")
        return None

    def _serve(self, number: int | str, begin: Callable[[], Awaitable[Answer]], large: bool) -> None:
        self._in_flight += 1
        self._large += large
        self._see_room()
        self._keep(self._own, self._served(number, begin, large))

    async def _served(self, number: int | str, begin: Callable[[], Awaitable[Answer]], large: bool) -> None:
        try:
            answer = await begin()
        except Exception as error:
            answer = failure(error)
        except asyncio.CancelledError:
            if self._over.is_set():
                raise
            answer = CLOSED
        finally:
            self._large -= large
            self._in_flight -= 1
        await self._reply(number, answer)

    async def _stepped(self, number: int | str, session: PlayedSession) -> None:
        answer = await session.play()
        self._in_flight -= 1
        await self._reply(number, answer)

    async def _reply(self, number: Any, answer: Answer) -> None:
        """Send it, and what others have to say meanwhile; while another reply is written, that is where this one goes out."""
        if self._over.is_set():
            return
        reply = _framed(number, answer)
        self._replies.append(reply)
        self._unsent += len(reply)
        if self._writing:
            self._see_room()
            return
        self._writing = True
        try:
            while self._replies and not self._over.is_set():
                reply = self._replies.popleft()
                await self._send({"type": "websocket.send", "text": reply})
                self._unsent -= len(reply)
                if not self._has_room.is_set():
                    self._see_room()
        except Exception:  # the connection is gone: `receive` tells its end
            self._over.set()
        finally:
            self._writing = False
            self._see_room()

    def _see_room(self) -> None:
        if self._over.is_set() or (self._unsent <= MAX_UNSENT and self._large < MAX_LARGE):
            self._has_room.set()
        else:
            self._has_room.clear()

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
