"""Binding a server: where it may listen, and for how long."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import uvicorn
from fastapi import FastAPI

from agentrl.errors import ConfigError
from agentrl.tokens import read_token

from .connection import WatchedProtocol

__all__ = ["bind", "check_bind", "is_loopback", "listening", "make_server", "read_token", "serve_forever", "url_of"]

BACKLOG = 2048
IDLE_S = 60
"""How long a connection is kept that no client asks on."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, token: str | None, flag: str = "--token-file") -> None:
    """Raises ConfigError for an address that other machines reach, without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(f"listening on {host} lets other machines in: give a token with {flag}, or use 127.0.0.1.")


def bind(host: str, port: int) -> socket.socket:
    """A socket that connections may queue at; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio turns Nagle off for no other
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server; `up` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say that the app's lifespan failed, which it has logged
            raise ConfigError("the server did not start: the log says why") from None
        self.up.set()


def make_server(app: FastAPI, lifespan: Literal["auto", "off"] = "auto") -> Server:
    """uvicorn without an access log (paths and keys stay out of logs) and without compression of WebSocket messages."""
    config = uvicorn.Config(
        app,
        http=WatchedProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        ws_max_size=app.state.bounds.body,
        ws_per_message_deflate=False,
        lifespan=lifespan,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=5,
    )
    return Server(config)


@asynccontextmanager
async def listening(
    app: FastAPI, listener: socket.socket, lifespan: Literal["auto", "off"] = "auto"
) -> AsyncIterator[str]:
    """Serve on the running event loop for as long as the context lasts; gives the URL. No signal handler is installed."""
    server = make_server(app, lifespan)
    serving = asyncio.ensure_future(server._serve([listener]))
    up = asyncio.ensure_future(server.up.wait())
    try:
        await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield url_of(listener)
    finally:
        up.cancel()
        server.should_exit = True
        await asyncio.wait({serving})
        listener.close()


def serve_forever(app: FastAPI, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. The process is the server's: what it holds at its start is never garbage."""
    gc.collect()
    gc.freeze()
    make_server(app).run([listener])
