"""The env server's routes. `agentrl serve env` is this app behind uvicorn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from agentrl.assemble import EnvSource
from agentrl.config import Config
from agentrl.schemas import (
    EnvsReply,
    LeaseReply,
    OpenSession,
    SessionReply,
    StepReply,
    StepRequest,
    TasksReply,
)

from .env_offer import Offer
from .env_play import Answer
from .env_service import EnvLimits, EnvService
from .env_stream import StreamEndpoint
from .http import (
    ERRORS,
    Bounds,
    bearer,
    described_body,
    make_app,
    parse_json,
    read_body,
    receive_body,
    send_json,
    validated,
)

MAX_PAGE = 1000


def env_app(
    envs: Mapping[str, Any] | Sequence[EnvSource],
    *,
    token: str | None = None,
    limits: EnvLimits = EnvLimits(),
    bounds: Bounds = Bounds(),
) -> FastAPI:
    """An app that serves envs: classes or factories by name, or sources that know their options.

    The envs are looked at when the server starts, or before when `app.state.look` is awaited: it raises EnvError or
    ConfigError for one that cannot be constructed, which also keeps the server from starting.
    """
    if isinstance(envs, Mapping):
        envs = [EnvSource(Config.model_validate({"env": {"name": name}}), env) for name, env in envs.items()]
    offers = [Offer(source, limits.call_timeout_s) for source in envs]

    async def look() -> None:
        for offer in offers:
            await offer.look()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await look()
        yield
        await service.end()

    app = make_app("agentrl env server", authorize=bearer(token), bounds=bounds, lifespan=life)
    app.state.look = look
    service = EnvService(offers, limits, app.state.registry)
    _add_routes(app, service)
    _add_session_routes(app, service)
    return app


class StepEndpoint:
    """The step route as bare ASGI: it is called far more often than all others."""

    def __init__(self, service: EnvService, bounds: Bounds) -> None:
        self.service = service
        self.bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = validated(StepRequest, parse_json(await receive_body(receive), self.bounds))
        answer = await self.service.step(scope["path_params"]["session_id"], request)
        await send_json(send, answer.status, answer.body)


def _sent(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type="application/json")


def _add_routes(app: FastAPI, service: EnvService) -> None:
    @app.get("/v1/envs", responses={200: {"model": EnvsReply}})
    async def envs() -> Response:
        return _sent(service.envs())

    @app.get("/v1/envs/{name}/tasks", responses={200: {"model": TasksReply}, **ERRORS})
    async def tasks(
        name: str,
        split: Annotated[str, Query(max_length=100)] = "train",
        offset: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> Response:
        return _sent(await service.tasks(name, split, offset, limit))

    @app.get("/v1/images/{sha256}", responses={200: {"content": {"image/png": {}}}, **ERRORS})
    async def image(sha256: str) -> Response:
        return Response(service.image(sha256), media_type="image/png")

    app.router.routes.append(WebSocketRoute("/v1/stream", StreamEndpoint(service, app.state.bounds)))


def _add_session_routes(app: FastAPI, service: EnvService) -> None:
    opening, stepping = described_body(app, OpenSession), described_body(app, StepRequest)

    @app.post("/v1/sessions", responses={200: {"model": SessionReply}, **ERRORS}, openapi_extra=opening)
    async def open_session(request: Request) -> Response:
        return _sent(await service.open(await read_body(request, OpenSession)))

    path = "/v1/sessions/{session_id}/step"
    app.router.routes.insert(0, Route(path, StepEndpoint(service, app.state.bounds), methods=["POST"]))

    @app.post(path, responses={200: {"model": StepReply}, **ERRORS}, openapi_extra=stepping)
    async def step(session_id: str, request: Request) -> Response:
        # Described here, served by the endpoint before it.
        return _sent(await service.step(session_id, await read_body(request, StepRequest)))

    @app.post("/v1/sessions/{session_id}/heartbeat", responses={200: {"model": LeaseReply}, **ERRORS})
    async def heartbeat(session_id: str) -> Response:
        return _sent(service.heartbeat(session_id))

    @app.delete("/v1/sessions/{session_id}", responses=ERRORS)
    async def close(session_id: str) -> Response:
        return _sent(await service.close(session_id))
