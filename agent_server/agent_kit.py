"""The agent's side: an async function as an agent server that `agentrl train --agent http://…` can train.

from agentrl.agent_server import agent_app
app = agent_app(run)        # async def run(task, client) -> {"reward": …}

uvicorn my_agent:app --port 9000
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.env import Task
from agentrl.errors import AgentRLError, DataError
from agentrl.schemas import ErrorReply
from agentrl.tokens import without_keys
from agentrl.wire import read_task

from .agent_wire import MOST_WAIT_S, EpisodeReply, EpisodeRequest
from .executors import Run, outcome_fields
from .http import (
    ERRORS,
    ApiError,
    as_api_error,
    bearer,
    described_body,
    json_response,
    make_app,
    read_body,
    render_error,
)
from .listen import is_loopback, read_token
from .sdk_clients import Clients, wanted_client

log = logging.getLogger(__name__)
EPISODES_KEPT = 10000
DEFAULT_EPISODE_S = 3600.0
CANCELLED = {200: {"model": EpisodeReply}, **ERRORS}
REPLIES = {
    **CANCELLED,
    202: {"model": EpisodeReply, "description": "still running"},
    409: {"model": ErrorReply, "description": "another attempt, or cancelled"},
    500: {"model": ErrorReply, "description": "what the agent raised"},
}


@dataclass(eq=False)
class _Episode:
    """One attempt at an episode."""

    request: EpisodeRequest = field(repr=False)
    running: asyncio.Task[dict[str, Any]] = field(repr=False)

    @property
    def where(self) -> dict[str, Any]:
        return {"episode_id": self.request.episode_id, "attempt": self.request.attempt}


def agent_app(run: Run, *, token_file: str | None = None) -> FastAPI:
    """An ASGI app that runs `run(task, client)` for every episode it is ordered. Without a token it answers this machine only.

    `client` is a ready AsyncOpenAI, or AsyncAnthropic where the parameter is annotated so. Raises ConfigError.
    """
    token = read_token(token_file, "token_file")
    app = make_app("agentrl agent", authorize=bearer(token))
    if token is None:
        app.add_middleware(_ThisMachineOnly)
    book = _Book(run)

    @app.post("/v1/episodes", responses=REPLIES, openapi_extra=described_body(app, EpisodeRequest))
    async def begin(request: Request, wait_s: Annotated[float, Query(ge=0)] = 0.0) -> Response:
        return await book.reply(book.begin(await read_body(request, EpisodeRequest)), wait_s)

    @app.get("/v1/episodes/{episode_id}", responses=REPLIES)
    async def state(
        episode_id: str,
        wait_s: Annotated[float, Query(ge=0)] = 0.0,
        attempt: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        return await book.reply(book.find(episode_id, attempt), wait_s)

    @app.delete("/v1/episodes/{episode_id}", responses=CANCELLED)
    async def cancel(episode_id: str, attempt: Annotated[int | None, Query(ge=0)] = None) -> Response:
        episode = book.find(episode_id, attempt)
        episode.running.cancel()
        await asyncio.wait({episode.running}, timeout=MOST_WAIT_S)
        return json_response({**episode.where, "status": "cancelled"})

    return app


class _Book:
    """The episodes of a server, the newest attempt of each; ended ones are kept for a while."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._clients = Clients(wanted_client(run))
        self._episodes: OrderedDict[str, _Episode] = OrderedDict()

    def begin(self, request: EpisodeRequest) -> _Episode:
        """The episode of this order: the one under way if it is a repeat, else a new one. Raises ApiError 409."""
        known = self._episodes.get(request.episode_id)
        if known is not None:
            if known.request.idempotency_key == request.idempotency_key:
                return known
            if request.attempt <= known.request.attempt:
                raise ApiError(409, f"attempt {known.request.attempt} of this episode is known", kind="OtherAttempt")
            known.running.cancel()
        task, client = _task(request), self._client(request)
        episode = _Episode(request, asyncio.ensure_future(self._play(task, client, request)))
        episode.running.add_done_callback(_retrieve)
        self._episodes[request.episode_id] = episode
        self._episodes.move_to_end(request.episode_id)
        self._forget()
        return episode

    def _forget(self) -> None:
        ended = [name for name, episode in self._episodes.items() if episode.running.done()]
        for name in ended[: max(0, len(self._episodes) - EPISODES_KEPT)]:
            del self._episodes[name]

    def find(self, episode_id: str, attempt: int | None) -> _Episode:
        """Raises ApiError 404, or 409 when another attempt is asked for."""
        if episode_id not in self._episodes:
            raise ApiError(404, "there is no such episode here")
        episode = self._episodes[episode_id]
        if attempt is not None and attempt != episode.request.attempt:
            raise ApiError(409, f"attempt {episode.request.attempt} is the newest", kind="OtherAttempt")
        return episode

    def _client(self, request: EpisodeRequest) -> Any:
        """Raises ApiError 422 for an address or key that the SDK cannot use, 500 when the SDK is not installed."""
        try:
            return self._clients.make(request.policy.base_url, request.policy.api_key)
        except AgentRLError as error:
            raise as_api_error(error) from error
        except Exception as error:  # each SDK has errors of its own for this
            raise ApiError(422, f"policy: {error}", kind="Invalid") from error

    async def _play(self, task: Task, client: Any, request: EpisodeRequest) -> dict[str, Any]:
        given = request.limits.get("episode_timeout_s")
        bound = float(given) if isinstance(given, int | float) and 0 < given < 1e9 else DEFAULT_EPISODE_S
        async with asyncio.timeout(bound):
            return outcome_fields(await self.run(task, client))

    async def reply(self, episode: _Episode, wait_s: float) -> Response:
        """200 with the outcome, or 202. Raises ApiError 500 with what the agent raised."""
        await asyncio.wait({episode.running}, timeout=min(wait_s, MOST_WAIT_S))
        if not episode.running.done():
            return json_response({**episode.where, "status": "running"}, 202)
        if episode.running.cancelled():
            raise ApiError(409, "the episode was cancelled", kind="Cancelled")
        error = episode.running.exception()
        if error is not None:
            told = without_keys("".join(traceback.format_exception(error)))
            log.warning("episode %s failed: %s", episode.request.episode_id, told)
            message = without_keys(f"the agent raised {type(error).__name__}: {error}")
            return render_error(ApiError(500, message, kind="AgentError"))
        return json_response({**episode.where, "status": "done", **episode.running.result()})


def _task(request: EpisodeRequest) -> Task:
    try:
        return read_task(request.task.model_dump())
    except DataError as error:
        raise ApiError(422, str(error), kind="Invalid") from error


class _ThisMachineOnly:
    """Without a token, nobody from elsewhere is answered, whatever address the server was told to listen on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") if scope["type"] == "http" else None
        if client is not None and not is_loopback(client[0]):
            refusal = ApiError(401, "other machines need a token: agent_app(run, token_file=…)")
            return await render_error(refusal)(scope, receive, send)
        await self.app(scope, receive, send)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
