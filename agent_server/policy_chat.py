"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.policy_ask import Ask, BadAskError
from agentrl.policy_call import Call, Turn
from agentrl.policy_session import PolicySession

from .policy_errors import Fault
from .policy_exchange import (
    Exchange,
    chat_message,
    engine_wishes,
    event,
    pieces,
    refuse,
    sampled_tokens,
    stop_strings,
)

MOST_SAMPLES = 128


class ChatRequest(BaseModel):
    """`POST /v1/chat/completions`. Fields that are not here are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    functions: Any = None
    web_search_options: Any = None
    audio: Any = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    seed: int | None = None


DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed")


class ChatExchange(Exchange):
    """One chat completion."""

    @staticmethod
    def error_body(fault: Fault) -> dict[str, Any]:
        return fault.openai()

    def __init__(self, body: dict[str, Any], session: PolicySession, model: str) -> None:
        super().__init__("chatcmpl-")
        request = ChatRequest.model_validate(body)
        refuse(functions=request.functions, web_search_options=request.web_search_options, audio=request.audio)
        self.request = request
        self.model = request.model or model
        self.stream = bool(request.stream)
        self.session = session
        self.ask = Ask(
            messages=tuple(chat_message(message, session) for message in request.messages),
            tools=tuple(function_tool(tool) for tool in request.tools or ()),
            parse_calls=request.tool_choice != "none",
            n=request.n or 1,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stop=stop_strings(request.stop),
            wishes=_wishes(request),
        )

    def whole(self, call: Call, turns: list[Turn]) -> dict[str, Any]:
        choices = [
            {"index": i, "message": _message(turn), "logprobs": self._logprobs(turn), "finish_reason": finish(turn)}
            for i, turn in enumerate(turns)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(call, turns)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def opening(self, call: Call) -> Iterator[bytes]:
        for i in range(self.ask.n):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def said(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        for i, turn in enumerate(turns):
            for piece in pieces(turn.content):
                yield self._chunk(i, {"content": piece})
            for k, function in enumerate(tool_calls(turn)):
                yield self._chunk(i, {"tool_calls": [{"index": k, **function}]})

    def closing(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        for i, turn in enumerate(turns):
            yield self._chunk(i, {}, finish_reason=finish(turn), logprobs=self._logprobs(turn))
        if (self.request.stream_options or {}).get("include_usage"):
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(call, turns)})
        yield b"data: [DONE]\n\n"

    def failed(self, fault: Fault) -> bytes:
        return event(fault.openai())

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        text = self.session.ctx.renderer.text
        pairs = zip(turn.generation.token_ids, turn.generation.logprobs, strict=True)
        entries = [(text((token,), special=True), logprob) for token, logprob in pairs]
        content = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in entries
        ]
        return {"content": content, "refusal": None}


def _wishes(request: ChatRequest) -> dict[str, Any]:
    wishes = {**engine_wishes(request.model_extra), **{name: getattr(request, name) for name in DISTRIBUTION}}
    wishes["logit_bias"] = request.logit_bias or None
    wishes["top_logprobs"] = request.top_logprobs or None
    formatted = isinstance(request.response_format, dict) and request.response_format.get("type") != "text"
    wishes["response_format"] = request.response_format if formatted else None
    wishes["tool_choice"] = None if request.tool_choice in (None, "auto", "none") else request.tool_choice
    return {name: value for name, value in wishes.items() if value is not None}


def function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI function schema, `{"type": "function", "function": {…}}`. Raises BadAskError for another kind of tool."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadAskError(f"only function tools are known, not {str(tool.get('type'))[:40]!r}")
    if not isinstance(function.get("name"), str):
        raise BadAskError("a tool needs a name")
    if not isinstance(function.get("description"), str | None):
        raise BadAskError(f"the description of tool {function['name'][:80]} is not a text")
    if not isinstance(function.get("parameters"), dict | None):
        raise BadAskError(f"the parameters of tool {function['name'][:80]} are not a JSON schema")
    return {"type": "function", "function": function}


def finish(turn: Turn) -> str:
    """OpenAI's finish_reason."""
    return "stop" if turn.finish == "placeholder" else turn.finish


def tool_calls(turn: Turn) -> list[dict[str, Any]]:
    """The calls of a reply, arguments as JSON text."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
        for call in turn.calls
    ]


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.calls:
        message |= {"content": turn.content or None, "tool_calls": tool_calls(turn)}
    return message


def _usage(call: Call, turns: list[Turn]) -> dict[str, int]:
    sampled = sampled_tokens(turns)
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": call.prompt_tokens + sampled,
    }
