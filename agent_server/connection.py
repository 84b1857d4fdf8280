"""What a server knows of a client's connection beside the requests on it: whether the client took what it was sent.

Bytes that the client's kernel holds may be read or not. A client that closes its socket with some of them unread resets the
connection (RFC 1122, 4.2.2.13), and one that has read everything ends it in order: that tells the two apart afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

STATE = "connection"
SETTLING = 8
"""Turns of the event loop from a reset that this machine's kernel knows of to whoever watches for it; a few to spare."""


class Connection:
    """One client's connection. `lost` = it is over; nothing that is sent arrives any more. `heard` counts what the client has
    sent.
    """

    lost = False
    heard = 0
    _reset = False
    _watcher: Callable[[], None] | None = None

    async def drained(self) -> None:
        """Until there is room to write, or the connection is lost."""

    async def taken(self) -> bool:
        """Waits until the kernel has all that was written; False when the client broke off before."""
        return True

    def watch(self, reset: Callable[[], None], heard: int) -> None:
        """Call `reset` when the client breaks off with something of an answer unread; no more once it asks again. `heard` was the
        count when the answer began: the client may have asked again by now.
        """
        if self.heard == heard:
            self._watcher = reset

    def spoken(self) -> None:
        """The client asks: it has read every answer."""
        self.heard += 1
        self._watcher = None

    def end(self, error: Exception | None) -> None:
        self.lost, self._reset = True, error is not None
        watcher, self._watcher = self._watcher, None
        if error is not None and watcher is not None:
            watcher()


class _ServedConnection(Connection):
    """Of a server that `listen.make_server` made."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    async def drained(self) -> None:
        await self._protocol.flow.drain()

    async def taken(self) -> bool:
        self._keep_back(0)
        try:
            await self._protocol.flow.drain()
        finally:
            self._keep_back(None)
        return not self._reset

    def _keep_back(self, most: int | None) -> None:
        """How many bytes may wait to be written; None = as before. uvloop refuses the question once a connection is over."""
        if not self.lost:
            self._protocol.transport.set_write_buffer_limits(high=most)


class WatchedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol; the app finds its `Connection` in the scope's state."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        self.watched = _ServedConnection(self)
        super().__init__(config, server_state, {**app_state, STATE: self.watched}, _loop)

    def data_received(self, data: bytes) -> None:
        self.watched.spoken()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.watched.end(exc)


def connection_of(scope: Scope) -> Connection:
    """The connection of a request. Under another server than ours one that never tells anything."""
    return scope.get("state", {}).get(STATE) or Connection()


async def settled() -> None:
    """Until every reset that has reached this machine is known to whoever watches for it."""
    for _ in range(SETTLING):
        await asyncio.sleep(0)
