"""Sending a reply, and knowing whether it arrived: a client that leaves early cancels what is sampled for it.

A reply counts as delivered when the client's side has taken its last byte, and not any more when the client breaks off with
something of it unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl.policy_call import Call, Turn

from .connection import Connection, connection_of
from .policy_errors import Fault, fault_of
from .policy_exchange import Exchange, dumps

PACE_S = 0.005
"""Pause after each piece of a stream. The whole reply was sampled before: without a pause a client could not leave half-way."""
KEEP_ALIVE_S = 15.0
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}

Sent = list[Turn] | None
"""The replies that were written in full; None where none were."""


def error_response(fault: Fault, body: Callable[[Fault], dict[str, Any]]) -> JSONResponse:
    return JSONResponse(body(fault), status_code=fault.status, headers=fault.headers)


class Answer(Response):
    """The answer to one call."""

    def __init__(self, exchange: Exchange, call: Call) -> None:
        super().__init__()
        self.exchange = exchange
        self.call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        heard = connection.heard
        async with self.call.attended():
            turns = await self._unless_gone(self._answer(scope, receive, send, connection), receive)
            if turns and await connection.taken():
                self.exchange.delivered(turns)
                self.call.deliver()
                connection.watch(self.call.withdraw, heard)

    async def _unless_gone(self, answer: Coroutine[Any, Any, Sent], receive: Receive) -> Sent:
        """The answer, which a client that leaves ends."""
        answering = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.wait({answering})
        return None if answering.cancelled() else answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, connection: Connection) -> Sent:
        if self.exchange.stream:
            return await self._stream(send, connection)
        try:
            turns = await self.call.turns()
        except Exception as error:
            await error_response(fault_of(error), self.exchange.error_body)(scope, receive, send)
            return None
        whole = dumps(self.exchange.whole(self.call, turns)).encode()
        await _start(send, {"content-type": "application/json", "content-length": str(len(whole))})
        return turns if await _end(send, whole, connection) else None

    async def _stream(self, send: Send, connection: Connection) -> Sent:
        await _start(send, STREAM_HEADERS)
        await _pieces(send, self.exchange.opening(self.call))
        try:
            turns = await self._turns(send)
        except Exception as error:
            await _body(send, self.exchange.failed(fault_of(error)), more=False)
            return None
        await _pieces(send, self.exchange.said(self.call, turns))
        closing = b"".join(self.exchange.closing(self.call, turns))
        return turns if await _end(send, closing, connection) else None

    async def _turns(self, send: Send) -> list[Turn]:
        """The replies; a comment now and then keeps proxies from closing the stream meanwhile."""
        coming = asyncio.ensure_future(self.call.turns())
        try:
            while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                await _body(send, b": waiting\n\n")
            return coming.result()
        finally:
            coming.cancel()


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _end(send: Send, body: bytes, connection: Connection) -> bool:
    """The last body; whether it was written. It goes out in one piece with the end of the response: clients stop reading
    there.
    """
    await connection.drained()
    if connection.lost:
        return False
    await _body(send, body, more=False)
    return True


async def _pieces(send: Send, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        await _body(send, piece)
        await asyncio.sleep(PACE_S)
