"""A server on a thread and event loop of its own, so that clients may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.listen import bind, listening


@contextmanager
def background(app: Any, port: int = 0) -> Iterator[str]:
    """Gives the URL of an app that listens on loopback."""
    up: list[str] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with listening(app, bind("127.0.0.1", port)) as url:
            up.append(url)
            started.set()
            await over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30) and up, "the server did not start"
    try:
        yield up[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


@contextmanager
def serving_envs(envs: dict[str, Any], port: int = 0, **options: Any) -> Iterator[str]:
    with background(env_app(envs, **options), port) as url:
        yield url
