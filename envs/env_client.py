"""Calls of an env server from one event loop: one WebSocket where it is offered, else HTTP.

Every call may be sent again, as the server replays what it has recorded: sessions go by idempotency key, steps by index.
Lost connections, 429 and answers of something between here and the server are retried with backoff; a call without an
answer is sent again for as long as the server shows that it is there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import urllib.parse
import weakref
from collections.abc import Mapping
from typing import Any

import aiohttp
import pydantic_core

from agentrl import wire
from agentrl.backoff import pauses
from agentrl.errors import AgentRLError, BusyError, ConfigError, EnvError, InfrastructureError

MAX_REPLY = 256 * 2**20
MAX_MESSAGE = 64 * 1024
"""Bytes of the longest call that goes over the stream: a server drops the whole connection for one over its bound."""
PING_S = 20.0
RESEND_S = 15.0
PROBE_S = 5.0
SHORTEST_TRY_S = 0.05
TRIES = 3
"""Of a call that the server says may be tried again."""
NOT_OFFERED = (*range(100, 429), *range(430, 500), 501)
Answer = tuple[int, dict[str, Any], float]
"""(status, reply, seconds to wait before another try)"""
log = logging.getLogger(__name__)


class EnvClient:
    """`call` from many tasks at once. `patience_s` bounds how long a server may give no sign of life; `resend_s` is when a
    call is repeated.
    """

    def __init__(self, url: str, token: str | None, patience_s: float, resend_s: float = RESEND_S) -> None:
        self.url = url
        self.patience = patience_s
        self.resend = resend_s
        self.users = 0
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._connecting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._stream = True
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Answer]] = {}

    async def call(
        self, name: str, session_id: str | None = None, *, patience_s: float | None = None, **body: Any
    ) -> dict[str, Any]:
        """The reply of `envs`, `tasks`, `create`, `step`, `heartbeat`, `close` or `image`. Raises what `refusal` gives,
        BusyError when no session is free.
        """
        patience = self.patience if patience_s is None else patience_s
        loop = asyncio.get_running_loop()
        heard, longest = loop.time(), self.resend
        failures = 0
        for pause in pauses():
            try:
                async with asyncio.timeout(longest) as scope:
                    status, reply, after = await self._send(name, session_id, body)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                what, after = f"{type(error).__name__}: {error}", 0.0
                if scope.expired():
                    what = "it accepts connections and says nothing"
                    if await self._is_alive():
                        heard, longest = loop.time(), self.resend
                        continue
            else:
                if status < 400:
                    return reply
                failures += status >= 500
                if status != 429 and not _may_pass(name, status, reply, failures):
                    raise refusal(status, reply)
                if status == 429 and name == "create":
                    raise BusyError(f"env server {self.url}: all its sessions are taken (429)")
                what = f"status {status}"
                heard = loop.time() if status == 429 else heard
            pause = max(after, pause)
            left = heard + patience - loop.time() - pause
            if left < 0:
                raise InfrastructureError(f"env server {self.url}: no answer to {name} in {patience:g} s ({what})")
            await asyncio.sleep(pause)
            longest = min(self.resend, max(left, SHORTEST_TRY_S))
        raise AssertionError("there is always another pause")

    async def _is_alive(self) -> bool:
        """Whether the server answers anything, and not for it a proxy that cannot reach it."""
        try:
            async with (
                asyncio.timeout(min(PROBE_S, self.resend)),
                self._http.get(f"{self.url}/health", allow_redirects=False) as response,
            ):
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def _send(self, name: str, session_id: str | None, body: Mapping[str, Any]) -> Answer:
        number = next(self._numbers)
        said = {} if session_id is None else {"session_id": session_id}
        message = wire.dump({"id": number, "call": name, **said, **body}, nan=True) if self._stream else b""
        socket = await self._connected() if self._stream and len(message) <= MAX_MESSAGE else None
        if socket is None:
            return await self._ask(name, session_id, body)
        coming: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = coming
        try:
            await socket.send_str(message.decode())
            return await coming
        finally:
            self._pending.pop(number, None)

    async def _connected(self) -> aiohttp.ClientWebSocketResponse | None:
        """The stream, connected again if it was lost; None where the server offers none."""
        if self._socket is not None and not self._socket.closed:
            return self._socket
        async with self._connecting:
            if self._socket is not None and not self._socket.closed:
                return self._socket
            try:
                url = f"{self.url}/v1/stream"
                self._socket = await self._http.ws_connect(url, heartbeat=PING_S, max_msg_size=MAX_REPLY)
            except aiohttp.WSServerHandshakeError as error:
                if error.status in NOT_OFFERED:
                    self._stream = False
                    return None
                raise
            self._reader = asyncio.ensure_future(self._read(self._socket))
            return self._socket

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Give replies to who waits for them; when the connection ends, whoever waits is told."""
        try:
            async for message in socket:
                reply = pydantic_core.from_json(message.data)
                coming = self._pending.get(reply.get("id"))
                if coming is not None and not coming.done():
                    coming.set_result((reply.get("status", 500), reply, 0.0))
        except (ValueError, AttributeError, TypeError):
            pass  # not the protocol: the connection is given up, as if it were lost
        finally:
            lost, self._pending = self._pending, {}
            for coming in lost.values():
                if not coming.done():
                    coming.set_exception(ConnectionResetError("the stream ended"))
            with contextlib.suppress(Exception):
                await socket.close()

    async def _ask(self, name: str, session_id: str | None, body: Mapping[str, Any]) -> Answer:
        """The call as an HTTP request."""
        if name == "image":
            return await self._image(body["sha256"])
        method, path, rest = _route(name, session_id, body)
        data = wire.dump(rest, nan=True) if rest else None
        headers = {"Content-Type": "application/json"}
        async with self._http.request(
            method, self.url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            return _answer(response.status, await response.read(), response.headers.get("Retry-After"))

    async def _image(self, sha256: str) -> Answer:
        async with self._http.get(f"{self.url}/v1/images/{sha256}", allow_redirects=False) as response:
            content = await response.read()
            if response.status == 200:
                return 200, {"sha256": sha256, "data": base64.b64encode(content).decode()}, 0.0
            return _answer(response.status, content, response.headers.get("Retry-After"))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        await self._http.close()


def _route(name: str, session_id: str | None, body: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """(method, path with its query, body) of a call."""
    if name == "envs":
        return "GET", "/v1/envs", {}
    if name == "tasks":
        query = {key: value for key, value in body.items() if key != "env"}
        return "GET", f"/v1/envs/{urllib.parse.quote(body['env'], safe='')}/tasks?{urllib.parse.urlencode(query)}", {}
    if name == "create":
        return "POST", "/v1/sessions", body
    path = f"/v1/sessions/{session_id}"
    return ("DELETE", path, {}) if name == "close" else ("POST", f"{path}/{name}", body)


def _answer(status: int, content: bytes, retry_after: str | None) -> Answer:
    """Raises aiohttp's ClientError for a success that is no JSON object."""
    after = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.0
    try:
        reply = pydantic_core.from_json(content)
    except ValueError:
        reply = None
    if isinstance(reply, dict):
        return status, reply, after
    if status < 400:
        raise aiohttp.ClientPayloadError("the answer is no JSON object")
    return status, {}, after


def _may_pass(name: str, status: int, reply: Mapping[str, Any], failures: int) -> bool:
    """Whether another try may end otherwise, after that many failures. What a session has answered is recorded and stays; but
    something in front of it may have answered, or an `open` that failed, of which nothing is kept.
    """
    error = reply.get("error")
    if isinstance(error, dict) and error.get("retryable") is True:
        return name in ("envs", "tasks") or (status >= 500 and failures < TRIES)
    return status >= 500 and error is None


def refusal(status: int, reply: Mapping[str, Any]) -> AgentRLError:
    """An answer that is an error, as what it means here. A session that is gone, and a server's own failure, are
    infrastructure: the attempt is repeated from `reset`.
    """
    given = reply.get("error")
    error = given if isinstance(given, dict) else {}
    kind, message = error.get("class", ""), f"env server: {error.get('message', f'status {status}')}"
    if status == 401:
        return ConfigError("the env server wants a token: --env.token-file FILE with the one it was started with.")
    if kind in ("UnknownEnv", "UnknownSplit"):
        return ConfigError(message)
    if error.get("retryable") is True or kind in ("UnknownSession", "ServerError") or status == 404:
        return InfrastructureError(message)
    return EnvError(message)


class Link:
    """A server's address and token, and its clients: one for each event loop, alive while somebody uses it."""

    def __init__(self, url: str, token: str | None, patience_s: float) -> None:
        self.url = url
        self.token = token
        self.patience = patience_s
        self._said_full = False
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EnvClient] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Link, (self.url, self.token, self.patience)

    def take(self) -> EnvClient:
        """The running loop's client; give it back."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = EnvClient(self.url, self.token, self.patience)
        client.users += 1
        return client

    def say_full(self) -> None:
        """Warn that all sessions are taken; once."""
        if not self._said_full:
            log.warning(
                "env server %s: all its sessions are taken, episodes wait for one. agentrl serve env --max-sessions gives more.",
                self.url,
            )
        self._said_full = True

    async def ask(self, name: str, *, patience_s: float | None = None, **body: Any) -> dict[str, Any]:
        """One call, for who keeps no client."""
        client = self.take()
        try:
            return await client.call(name, patience_s=patience_s, **body)
        finally:
            await self.give_back(client)

    async def give_back(self, client: EnvClient) -> None:
        client.users -= 1
        if client.users == 0:
            self._clients.pop(asyncio.get_running_loop(), None)
            await client.close()
