"""The policy server of a process that plays episodes: it runs on the same event loop, for as long as that loop does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.errors import AgentRLError, ConfigError, InfrastructureError
from agentrl.policy_session import PolicySession
from agentrl.renderer import Renderer

from .connection import settled
from .listen import bind, check_bind, listening
from .policy_app import policy_app
from .policy_desk import RolloutDesk

MODEL = "policy"
"""What the policy is called; requests may call it anything."""
LINGER_S = 60.0
FOREVER_S = 1e9
"""A timer, as the event loop keeps alive what waits for one."""
BIND_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 2.0)
LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True)
class Listening:
    """Where a worker's policy server listens (`bind`, HOST:PORT, port 0 = a free one), and what agents are told of it."""

    bind: str = LOOPBACK
    advertise_url: str | None = None
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of_worker(cls, worker: int, bind: str | None, advertise_url: str | None, token: str | None) -> Listening:
        """Worker k listens on the port of `bind` + k. Raises ConfigError."""
        host, port = split_address(bind or LOOPBACK)
        check_bind(host, token, "--agent.token-file")
        if host in ("0.0.0.0", "::") and advertise_url is None:
            raise ConfigError(f"--agent.bind {bind} is no address to reach: name one with --agent.advertise-url.")
        if port + worker > 65535:
            raise ConfigError(f"--agent.bind {bind}: worker {worker} would listen on port {port + worker}.")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{shown}:{port + worker if port else 0}", advertise_url, token)

    def url(self, port: int, own: str) -> str:
        """The root URL that agents are told; `{port}` in advertise_url stands for this server's port."""
        root = own if self.advertise_url is None else self.advertise_url.replace("{port}", str(port))
        return root.rstrip("/").removesuffix("/v1")


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--agent.bind {address}: give HOST:PORT, as in 127.0.0.1:8100.")
    return host.strip("[]"), int(port)


async def bind_patiently(host: str, port: int) -> socket.socket:
    """A bound socket. A worker that was killed may hold its port for a moment; its successor waits. Raises ConfigError."""
    for pause in BIND_PAUSES_S:
        try:
            return bind(host, port)
        except ConfigError:
            await asyncio.sleep(pause)
    return bind(host, port)


class PolicyHost:
    """One policy server and the keys of the rollouts it serves."""

    def __init__(self, where: Listening, renderer: Renderer, max_len: int) -> None:
        self.desk = RolloutDesk(MODEL, max_len, renderer, where.token)
        self.loop = asyncio.get_running_loop()
        self._where = where
        self._up: asyncio.Future[str] = self.loop.create_future()
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        try:
            listener = await bind_patiently(*split_address(self._where.bind))
            async with listening(policy_app(self.desk), listener, "off") as own:
                self._up.set_result(self._where.url(listener.getsockname()[1], own))
                await asyncio.sleep(FOREVER_S)
        except AgentRLError as error:
            self._up.set_exception(error)

    @asynccontextmanager
    async def opened(self, session: PolicySession) -> AsyncIterator[tuple[str, str]]:
        """(root URL, key) under which an agent reaches the session; afterwards the key is answered with 410."""
        root = await asyncio.shield(self._up)
        if self._serving.done():
            raise InfrastructureError("the policy server is gone")
        key = self.desk.open(session)
        try:
            yield root, key
        finally:
            await settled()
            await session.end()
            self.desk.close(key)

    def retire(self) -> None:
        """Nobody opens sessions any more: late requests are answered for a while, then the server ends. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the server with it
            self.loop.call_soon_threadsafe(lambda: self.loop.call_later(LINGER_S, self._serving.cancel))

    async def close(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
