"""Calls of an env server from one event loop: one WebSocket where it is offered, else HTTP.

Every call may be sent again, as the server replays what it has recorded: sessions go by idempotency key, steps by index.
Lost connections, 429 and answers of something between here and the server are retried with backoff; a call without an
answer is sent again while the first may still run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import random
import weakref
from collections.abc import Mapping
from typing import Any

import aiohttp
import pydantic_core

from agentrl import wire
from agentrl.errors import AgentRLError, ConfigError, EnvError, InfrastructureError

MAX_REPLY = 256 * 2**20
PING_S = 20.0
RESEND_S = 15.0
NOT_OFFERED = (400, 404, 405, 426, 501)
Answer = tuple[int, dict[str, Any], float]
"""(status, reply, seconds to wait before another try)"""


class EnvClient:
    """`call` from many tasks at once. `patience_s` bounds how long a server may be gone; `resend_s` is when a call is repeated."""

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
        """The reply of `create`, `step`, `heartbeat`, `close` or `image`. Raises what `refusal` gives."""
        loop = asyncio.get_running_loop()
        patience = self.patience if patience_s is None else patience_s
        gone_since: float | None = None
        wait = 0.05
        while True:
            try:
                async with asyncio.timeout(self.resend) as scope:
                    status, reply, after = await self._send(name, session_id, body)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                if scope.expired():
                    gone_since = None
                    continue
                what = f"{type(error).__name__}: {error}"
                after = 0.0
            else:
                if status < 400:
                    return reply
                if status != 429 and (status < 500 or "error" in reply):
                    raise refusal(status, reply)
                what = f"status {status}"
            gone_since = gone_since if gone_since is not None else loop.time()
            pause = max(after, wait * random.uniform(0.5, 1.0))
            if loop.time() + pause - gone_since > patience:
                raise InfrastructureError(f"env server {self.url}: no answer to {name} in {patience:g} s ({what})")
            await asyncio.sleep(pause)
            wait = min(2 * wait, 5.0)

    async def _send(self, name: str, session_id: str | None, body: Mapping[str, Any]) -> Answer:
        socket = await self._connected() if self._stream else None
        if socket is None:
            return await self._ask(name, session_id, body)
        number = next(self._numbers)
        coming: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = coming
        try:
            said = {} if session_id is None else {"session_id": session_id}
            await socket.send_str(wire.dump({"id": number, "call": name, **said, **body}, nan=True).decode())
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
                if error.status == 401:
                    raise refusal(401, {}) from None
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
        path = "/v1/sessions" if name == "create" else f"/v1/sessions/{session_id}"
        path += f"/{name}" if name in ("step", "heartbeat") else ""
        method = "DELETE" if name == "close" else "POST"
        data = wire.dump(body, nan=True) if body else None
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


def refusal(status: int, reply: Mapping[str, Any]) -> AgentRLError:
    """An answer that is an error, as what it means here. A session that is gone, and a server's own failure, are
    infrastructure: the attempt is repeated from `reset`.
    """
    given = reply.get("error")
    error = given if isinstance(given, dict) else {}
    kind, message = error.get("class", ""), f"env server: {error.get('message', f'status {status}')}"
    if status == 401:
        return ConfigError("the env server wants a token: --env.token-file FILE with the one it was started with.")
    if kind == "UnknownEnv":
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
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EnvClient] = weakref.WeakKeyDictionary()

    def take(self) -> EnvClient:
        """The running loop's client; give it back."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = EnvClient(self.url, self.token, self.patience)
        client.users += 1
        return client

    async def give_back(self, client: EnvClient) -> None:
        client.users -= 1
        if client.users == 0:
            self._clients.pop(asyncio.get_running_loop(), None)
            await client.close()
