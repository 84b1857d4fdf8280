"""The policy server: one policy behind the APIs of OpenAI and Anthropic, one rollout behind each key."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from agentrl.errors import DataError
from agentrl.policy_ask import BadAskError
from agentrl.policy_session import PolicySession, fingerprint

from .connection import settled
from .http import ApiError, Bounds, described_body, make_app, read_json
from .policy_answer import Answer, error_response
from .policy_chat import ChatExchange, ChatRequest, function_tool
from .policy_desk import Desk
from .policy_errors import BodyError, Fault, fault_of
from .policy_exchange import chat_message, picture_urls
from .policy_messages import MessagesExchange, MessagesRequest
from .policy_responses import ResponsesExchange, ResponsesRequest

log = logging.getLogger(__name__)
Dialect = type[ChatExchange] | type[MessagesExchange] | type[ResponsesExchange]


class RewardRequest(BaseModel):
    """`POST /v1/rollouts/self/reward`. A reward that is null or no finite number is "no verdict"; without one only score and
    metrics are taken.
    """

    model_config = ConfigDict(extra="forbid")

    reward: Any = None
    score: Any = None
    metrics: dict[str, Any] | None = None


def policy_app(desk: Desk, bounds: Bounds = Bounds()) -> FastAPI:
    """The app over a desk."""
    app = make_app("agentrl policy", authorize=desk.admits, bounds=bounds, render=_render)
    _add_dialect(app, desk, "/v1/chat/completions", ChatExchange, ChatRequest)
    _add_dialect(app, desk, "/v1/responses", ResponsesExchange, ResponsesRequest)
    _add_dialect(app, desk, "/v1/messages", MessagesExchange, MessagesRequest)
    _add_models(app, desk)
    _add_counting(app, desk)
    if desk.scored:
        _add_rollout(app, desk)
    return app


def _render(error: ApiError) -> Response:
    """Errors outside a dialect's route, in a shape that both SDKs read."""
    codes = {401: ("invalid_api_key", "authentication_error"), 404: ("not_found", "not_found_error")}
    default = ("internal_error", "api_error") if error.status >= 500 else ("invalid_request_error",) * 2
    code, kind = codes.get(error.status, default)
    fault = Fault(error.status, code, kind, str(error))
    return error_response(fault, lambda fault: fault.anthropic() | {"error": fault.both()})


async def _body(request: Request, session: PolicySession) -> dict[str, Any]:
    """The request's JSON object, whose pictures the session has then decoded. Raises BodyError."""
    try:
        body = await read_json(request)
    except ApiError as error:
        raise BodyError(error.status, str(error)) from error
    if not isinstance(body, dict):
        raise BodyError(400, "the body must be a JSON object")
    await session.pictures.look(picture_urls(body), request.app.state.readers)
    return body


def _headers(request: Request) -> dict[bytes, bytes]:
    return dict(request.scope["headers"])


def _guarded(handler: Callable[[Request], Awaitable[Response]], shape: Callable[[Fault], dict[str, Any]]) -> Any:
    """The fault boundary of a route."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(fault_of(error), shape)

    return guarded


def _add_dialect(app: FastAPI, desk: Desk, path: str, dialect: Dialect, schema: type[BaseModel]) -> None:
    async def handle(request: Request) -> Response:
        session = desk.find(_headers(request))
        body = await _body(request, session)
        exchange = dialect(body, session, desk.model)
        call = session.ask(
            exchange.ask,
            fingerprint(body, path),
            retried=_retried(request),
            key=request.headers.get("idempotency-key"),
        )
        return Answer(exchange, call)

    _add(app, path, _guarded(handle, dialect.error_body), schema)


def _retried(request: Request) -> bool:
    """Whether the SDK says that it asks again."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count[:9]) > 0


def _add(app: FastAPI, path: str, handler: Any, schema: type[BaseModel] | None = None) -> None:
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        summary=(schema.__doc__ if schema is not None else None),
        openapi_extra=None if schema is None else described_body(app, schema),
        response_class=JSONResponse,
    )


def _add_models(app: FastAPI, desk: Desk) -> None:
    def described(name: str) -> dict[str, Any]:
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl", "max_model_len": desk.max_len}
        return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        ends = {"first_id": desk.model, "last_id": desk.model, "has_more": False}
        return {"object": "list", "data": [described(desk.model)], **ends}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(name)


def _add_counting(app: FastAPI, desk: Desk) -> None:
    async def tokenize(request: Request) -> Response:
        session = desk.find(_headers(request))
        body = await _body(request, session)
        ids = _ids(body, session, desk)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": desk.max_len})

    async def count(request: Request) -> Response:
        session = desk.find(_headers(request))
        ask = MessagesExchange(await _body(request, session), session, desk.model).ask
        return JSONResponse({"input_tokens": len(desk.renderer.start(ask.messages, ask.tools))})

    _add(app, "/tokenize", _guarded(tokenize, Fault.openai))
    _add(app, "/v1/messages/count_tokens", _guarded(count, Fault.anthropic), MessagesRequest)


def _ids(body: dict[str, Any], session: PolicySession, desk: Desk) -> list[int]:
    """Ids of `{"prompt": text}` as it is, or of `{"messages": […], "tools": […]}` through the chat template."""
    prompt, messages, tools = body.get("prompt"), body.get("messages"), body.get("tools") or []
    if isinstance(prompt, str):
        return list(desk.renderer.tokenizer(prompt, add_special_tokens=bool(body.get("add_special_tokens"))).input_ids)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadAskError("give a prompt, or a list of messages")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadAskError("tools must be a list of function tools")
    try:
        said = [chat_message(message, session) for message in messages]
        return list(desk.renderer.start(said, [function_tool(tool) for tool in tools]).token_ids)
    except DataError as error:
        raise BadAskError(str(error)) from error


def _add_rollout(app: FastAPI, desk: Desk) -> None:
    async def reward(request: Request) -> Response:
        session = desk.find(_headers(request))
        posted = RewardRequest.model_validate(await _body(request, session)).model_dump(exclude_unset=True)
        session.post_reward(posted, request.headers.get("idempotency-key"), retried=_retried(request))
        return JSONResponse({"ok": True})

    async def end(request: Request) -> Response:
        session = desk.find(_headers(request))
        session.refuse_ended()
        await settled()
        await session.end()
        return JSONResponse({"ok": True})

    _add(app, "/v1/rollouts/self/reward", _guarded(reward, Fault.openai), RewardRequest)
    _add(app, "/v1/rollouts/self/end", _guarded(end, Fault.openai))
