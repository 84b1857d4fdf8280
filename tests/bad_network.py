"""A bad network in front of a server: it delays, swallows and cuts what goes through, by a seed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager


class BadNetwork:
    """A TCP proxy that delays pieces, swallows answers, and cuts connections, by a seed.

    `restarts`: at these pieces the server behind it is another one, the next of `ports`, and every connection is lost.
    """

    def __init__(self, ports: Sequence[int], seed: int, restarts: Sequence[int] = ()) -> None:
        self.ports = deque(ports)
        self.restarts = set(restarts)
        self.pieces = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.connections: set[asyncio.Task[None]] = set()
        self.luck = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.on = True

    async def listen(self) -> str:
        """The URL that it listens at until `close`."""
        self.server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Nothing of it runs afterwards."""
        self.server.close()
        for connection in self.connections:
            connection.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self.connections.add(connection)
        try:
            await self._connect(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio's streams would print a handler that ends cancelled
        finally:
            self.connections.discard(connection)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_in, there_out = await asyncio.open_connection("127.0.0.1", self.ports[0])
        except ConnectionError:
            return writer.transport.abort()
        ways = [self._pump(reader, there_out, "request"), self._pump(there_in, writer, "answer")]
        pumps = [asyncio.ensure_future(way) for way in ways]
        self.open |= {writer, there_out}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open -= {writer, there_out}
            for pump in pumps:
                pump.cancel()
            for stream in (writer, there_out):
                stream.transport.abort()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, what: str) -> None:
        while True:
            try:
                piece = await source.read(65536)
            except ConnectionError:
                return
            self.pieces += 1
            if self.pieces in self.restarts:
                self._restart()
            if not piece:
                return
            dice = self.luck.random() if self.on else 1.0
            if dice < 0.04:
                self.faults[f"{what} cut"] += 1
                return
            if dice < 0.07 and what == "answer":
                self.faults["answer swallowed"] += 1
                continue
            if dice < 0.2:
                self.faults["delay"] += 1
                await asyncio.sleep(0.02)
            sink.write(piece)

    def _restart(self) -> None:
        self.faults["restart"] += 1
        self.ports.rotate(-1)
        for stream in self.open:
            stream.transport.abort()


@asynccontextmanager
async def bad_network(url: str, seed: int) -> AsyncIterator[tuple[BadNetwork, str]]:
    """The network in front of the server at `url`, and the URL to reach it through."""
    network = BadNetwork([int(url.rpartition(":")[2])], seed)
    url = await network.listen()
    try:
        yield network, url
    finally:
        await network.close()


@contextmanager
def restarting(urls: Sequence[str], restarts: Sequence[int]) -> Iterator[tuple[BadNetwork, str]]:
    """A server that starts again at these pieces of its traffic and knows nothing then: one of `urls` after the other, behind
    one URL, on a thread of its own.
    """
    network = BadNetwork([int(url.rpartition(":")[2]) for url in urls], seed=0, restarts=restarts)
    network.on = False
    loop = asyncio.new_event_loop()
    url = loop.run_until_complete(network.listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield network, url
    finally:
        asyncio.run_coroutine_threadsafe(network.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
