"""A bad network in front of a server: it delays, swallows and cuts what goes through, by a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BadNetwork:
    """A TCP proxy that delays pieces, swallows answers, and cuts connections, by a seed."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.luck = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.on = True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_in, there_out = await asyncio.open_connection("127.0.0.1", self.port)
        except ConnectionError:
            return writer.transport.abort()
        ways = [self._pump(reader, there_out, "request"), self._pump(there_in, writer, "answer")]
        pumps = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for stream in (writer, there_out):
            stream.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, what: str) -> None:
        while True:
            try:
                piece = await source.read(65536)
            except ConnectionError:
                return
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


@asynccontextmanager
async def bad_network(url: str, seed: int) -> AsyncIterator[tuple[BadNetwork, str]]:
    """The network in front of the server at `url`, and the URL to reach it through."""
    network = BadNetwork(int(url.rpartition(":")[2]), seed)
    server = await asyncio.start_server(network.handle, "127.0.0.1", 0)
    yield network, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
