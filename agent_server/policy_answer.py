"""Sending a reply, and knowing whether it arrived: a client that leaves early cancels what is sampled for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentrl.policy_session import Call, Turn

from .policy_errors import Fault, fault_of
from .policy_exchange import Exchange, dumps

PACE_S = 0.005
"""Pause after each piece of a stream. The whole reply was sampled before: without a pause a client could not leave half-way."""
KEEP_ALIVE_S = 15.0
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def error_response(fault: Fault, body: Callable[[Fault], dict[str, Any]]) -> JSONResponse:
    return JSONResponse(body(fault), status_code=fault.status, headers=fault.headers)


class Answer(Response):
    """The answer to one call. It counts as delivered when its last part is handed over to a client that is still there."""

    def __init__(self, exchange: Exchange, call: Call) -> None:
        super().__init__()
        self.exchange = exchange
        self.call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.call.attended():
            if self.exchange.stream:
                await self._stream(send)
                return
            try:
                turns = await self.call.turns()
            except Exception as error:
                await error_response(fault_of(error), self.exchange.error_body)(scope, receive, send)
                return
            whole = dumps(self.exchange.whole(self.call, turns)).encode()
            await _start(send, {"content-type": "application/json", "content-length": str(len(whole))})
            self._deliver(turns)
            await _body(send, whole, more=False)

    async def _stream(self, send: Send) -> None:
        await _start(send, STREAM_HEADERS)
        await _pieces(send, self.exchange.opening(self.call))
        try:
            turns = await self._turns(send)
        except Exception as error:
            await _body(send, self.exchange.failed(fault_of(error)), more=False)
            return
        await _pieces(send, self.exchange.said(self.call, turns))
        closing = b"".join(self.exchange.closing(self.call, turns))
        self._deliver(turns)
        await _body(send, closing, more=False)

    async def _turns(self, send: Send) -> list[Turn]:
        """The replies; a comment now and then keeps proxies from closing the stream meanwhile."""
        coming = asyncio.ensure_future(self.call.turns())
        try:
            while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                await _body(send, b": waiting\n\n")
            return coming.result()
        finally:
            coming.cancel()

    def _deliver(self, turns: list[Turn]) -> None:
        self.exchange.delivered(turns)
        self.call.deliver()


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _pieces(send: Send, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        await _body(send, piece)
        await asyncio.sleep(PACE_S)
