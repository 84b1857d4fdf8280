"""OpenEnv's server with the env of `env_part.Trivial`, in a process that finds OpenEnv on its path; prints its URL."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TEXT, MANY = sys.argv[1], 4096


class Say(Action):
    text: str


class Said(Observation):
    text: str


class Trivial(Environment[Say, Said, State]):
    """Does nothing, asynchronously."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, *given: Any, **options: Any) -> Said:
        return Said(text=TEXT)

    async def step_async(self, action: Say, *given: Any, **options: Any) -> Said:
        return Said(text=TEXT, reward=0.5, done=False)

    def reset(self, *given: Any, **options: Any) -> Said:
        return Said(text=TEXT)

    def step(self, action: Say, *given: Any, **options: Any) -> Said:
        return Said(text=TEXT, reward=0.5, done=False)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # it logs every disconnection
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = create_fastapi_app(Trivial, Say, Said, max_concurrent_envs=MANY)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_config=None, access_log=False, ws_per_message_deflate=False)
    uvicorn.Server(config).run([listener])
