"""What every server here shares: errors, the guard in front of an app, bodies, health and metrics.

An app is made by `make_app` and served by `listen.py`. The guard is plain ASGI: it asks for the bearer token and bounds
the body before anything reads it, of WebSockets too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import prometheus_client
import pydantic_core
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.env_calls import CallTimeoutError
from agentrl.errors import AgentRLError, BusyError, DataError, error_class
from agentrl.json_bounds import DEPTH, TOKENS, json_fault
from agentrl.schemas import ErrorReply

log = logging.getLogger(__name__)

KINDS = {400: "BadRequest", 401: "Unauthorized", 404: "NotFound", 405: "MethodNotAllowed", 413: "TooLarge"}

READERS = 2
READ_HERE = 2**18
"""Bytes; a larger body is read on a thread, as it takes time that others wait."""
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
"""What every route may answer besides, for `responses`."""


@dataclass(frozen=True)
class Bounds:
    """What a client may send: `body` in bytes (a WebSocket message counts as one), `depth` = nested arrays and objects,
    `tokens` = texts, arrays, objects and commas outside texts.
    """

    body: int = 64 * 2**20
    depth: int = DEPTH
    tokens: int = TOKENS


class ApiError(Exception):
    """An answer that is an error. `kind` is the error's class on the wire."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", retryable: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or KINDS.get(status, "Error")
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": f"{max(1, round(self.retry_after_s))}"}
        return {**headers, "WWW-Authenticate": "Bearer"} if self.status == 401 else headers

    def body(self) -> dict[str, Any]:
        return {"error": {"class": self.kind, "message": str(self), "retryable": self.retryable}}


def as_api_error(error: AgentRLError) -> ApiError:
    """Whose fault it was, as a status: 504 a call of the env that took too long, 500 what the env raised, 503 a service
    under it, 429 one without a free place, 422 what the client sent.
    """
    if isinstance(error, BusyError):
        return ApiError(429, str(error), kind="Full", retryable=True, retry_after_s=1)
    status = 503 if error.retryable else 422 if isinstance(error, DataError) else 500
    if isinstance(error.__cause__, CallTimeoutError):
        status = 504
    return ApiError(status, str(error), kind=error_class(error), retryable=error.retryable)


Model = TypeVar("Model", bound=BaseModel)
RenderError = Callable[[ApiError], Response]
Authorize = Callable[[Mapping[bytes, bytes]], bool]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """NaN and inf become null."""
    body = pydantic_core.to_json(value, inf_nan_mode="null", fallback=str)
    return Response(body, status, headers, media_type="application/json")


def render_error(error: ApiError) -> Response:
    """`{"error": {"class", "message", "retryable"}}`, the shape of every route that has no vendor's own."""
    return json_response(error.body(), error.status, error.headers)


def bearer(token: str | None) -> Authorize:
    """Whether a request's headers carry `Authorization: Bearer TOKEN`, compared in constant time.

    Without a token everybody on this machine may ask, but no web page that a browser has open (those send Origin).
    """
    if token is None:
        return lambda headers: b"origin" not in headers
    wanted = f"bearer {token}".encode()

    def authorize(headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + given, wanted)

    return authorize


def anybody(headers: Mapping[bytes, bytes]) -> bool:
    """For a server whose routes check keys of their own."""
    return True


def parse_json(body: bytes | str, bounds: Bounds) -> Any:
    """The value of a JSON text. Raises ApiError 400 for what is no JSON, no UTF-8, nested too deep, or of too many values."""
    if (fault := json_fault(body, bounds.depth, bounds.tokens)) is not None:
        raise ApiError(400, fault)
    try:
        return pydantic_core.from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def receive_body(receive: Receive) -> bytes:
    """The whole body of a request, straight from ASGI; the guard has bounded it."""
    message = await receive()
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    pieces = [message.get("body", b"")]
    while message.get("more_body"):
        message = await receive()
        pieces.append(message.get("body", b""))
    return b"".join(pieces)


async def send_json(send: Send, status: int, body: bytes) -> None:
    """A JSON answer, straight to ASGI."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_json(request: Request) -> Any:
    """The request's body as JSON, within the app's bounds. Raises ApiError."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ApiError(400, "the client left before it had sent the body") from None
    state = request.app.state
    if len(body) <= READ_HERE:
        return parse_json(body, state.bounds)
    return await asyncio.get_running_loop().run_in_executor(state.readers, parse_json, body, state.bounds)


def validated(model: type[Model], value: Any) -> Model:
    """Raises ApiError 422."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ApiError(422, explain(error.errors(include_url=False, include_context=False)), kind="Invalid") from None


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as a model. Raises ApiError 400, 413, 422."""
    return validated(model, await read_json(request))


def described_body(app: FastAPI, model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body by `read_body`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    app.state.schemas.update({**schema.pop("$defs", {}), model.__name__: schema})
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI) -> None:
    """`/openapi.json` with the schemas that `described_body` refers to."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for operation in (one for path in document["paths"].values() for one in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's own shape, which is not what is answered here
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name, schema in app.state.schemas.items():
            schemas.setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


class Guard:
    """ASGI middleware: authorization and the size of bodies; counts requests by status. `/health` is open."""

    def __init__(
        self, app: ASGIApp, authorize: Authorize, bounds: Bounds, render: RenderError, requests: Counter
    ) -> None:
        self.app = app
        self.authorize = authorize
        self.bounds = bounds
        self.render = render
        self.requests = requests
        self._by_status: dict[int, Any] = {}

    def _count(self, status: int) -> None:
        if status not in self._by_status:
            self._by_status[status] = self.requests.labels(status)
        self._by_status[status].inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if scope["type"] == "websocket":
            if refusal is None:
                return await self.app(scope, receive, send)
            return await _refuse_websocket(self.render(refusal), scope, receive, send)

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(message["status"])
            await send(message)

        if refusal is not None:
            return await self.render(refusal)(scope, receive, counted)
        try:
            await self.app(scope, self._bounded(headers, receive), counted)
        except Exception as error:  # the fault boundary of a request
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if started:
                raise
            failure = ApiError(500, f"{type(error).__name__} in the server", kind="ServerError")
            await self.render(failure)(scope, receive, counted)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        if scope["path"] == "/health":
            return None
        if not self.authorize(headers):
            return ApiError(401, "a valid bearer token is needed: Authorization: Bearer TOKEN")
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            return ApiError(400, "Content-Length is no number")
        return self._too_large() if len(declared) > 15 or int(declared) > self.bounds.body else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body may have {self.bounds.body} bytes")

    def _bounded(self, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        """A body of declared length is bounded already; of one that is not, the bytes are counted."""
        if b"transfer-encoding" not in headers:
            return receive
        taken = 0

        async def counting() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.bounds.body:
                raise self._too_large()
            return message

        return counting


async def _refuse_websocket(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the handshake as HTTP where the server can, else by closing it."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        return await send({"type": "websocket.close", "code": 1008})
    start = {"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": response.body})


def make_app(
    title: str,
    *,
    authorize: Authorize,
    bounds: Bounds = Bounds(),
    render: RenderError = render_error,
    **options: Any,
) -> FastAPI:
    """An app with the guard, errors in one shape, `/health`, `/metrics` and `/openapi.json`.

    `app.state.bounds`, `app.state.registry` (Prometheus) and `app.state.readers` (threads on which requests are read, and
    nothing that could wait for one) are for its routes; `options` go to FastAPI.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None, redirect_slashes=False, **options)
    registry = CollectorRegistry()
    requests = Counter("agentrl_http_requests", "Answers by status", ["status"], registry=registry)
    app.state.bounds, app.state.registry, app.state.schemas = bounds, registry, {}
    app.state.readers = ThreadPoolExecutor(READERS, "request reader")
    app.add_middleware(Guard, authorize=authorize, bounds=bounds, render=render, requests=requests)
    _answer_errors(app, render)
    _describe(app)

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> str:
        return "ok"

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return prometheus_client.generate_latest(registry).decode()

    return app


def _answer_errors(app: FastAPI, render: RenderError) -> None:
    async def api_error(request: Request, error: Any) -> Response:
        return render(error)

    async def http_error(request: Request, error: Any) -> Response:
        return render(ApiError(error.status_code, str(error.detail)))

    async def invalid(request: Request, error: Any) -> Response:
        return render(ApiError(422, explain(error.errors()), kind="Invalid"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def explain(problems: Any, shown: int = 3) -> str:
    """pydantic's findings in one line: where, and what."""
    lines = [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:shown]]
    return "; ".join(lines)
