"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.messages import Message, as_message
from agentrl.policy_ask import Ask, BadAskError
from agentrl.policy_call import Call, Turn
from agentrl.policy_session import PolicySession

from .policy_chat import function_tool
from .policy_errors import Fault, UnknownThreadError
from .policy_exchange import (
    Exchange,
    content_part,
    engine_wishes,
    event,
    pieces,
    refuse,
    sampled_tokens,
    stop_strings,
    tool_call,
)


class Thread(BaseModel):
    """A conversation that is kept here: begun, or continued from a reply by the new messages alone."""

    type: Literal["create", "continue"]
    previous_message_id: str = ""


class MessagesRequest(BaseModel):
    """`POST /v1/messages`. Fields that are not here are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    output_config: dict[str, Any] | None = None
    thread: Thread | None = None
    mcp_servers: Any = None
    compaction: Any = None
    container: Any = None


class MessagesExchange(Exchange):
    """One message. The conversation of a thread is kept with the session."""

    @staticmethod
    def error_body(fault: Fault) -> dict[str, Any]:
        return fault.anthropic()

    def __init__(self, body: dict[str, Any], session: PolicySession, model: str) -> None:
        super().__init__("msg_")
        request = MessagesRequest.model_validate(body)
        refuse(mcp_servers=request.mcp_servers, compaction=request.compaction, container=request.container)
        self.session = session
        self.threaded = request.thread is not None
        earlier, tools = self._earlier(request)
        self.model = request.model or model
        self.stream = bool(request.stream)
        choice = (request.tool_choice or {}).get("type", "auto")
        wishes = engine_wishes(request.model_extra)
        wishes |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        wishes["tool_choice"] = None if choice in ("auto", "none") else choice
        wishes["response_format"] = (request.output_config or {}).get("format")
        self.ask = Ask(
            messages=(*earlier, *_conversation(request, session)),
            tools=(*tools, *(_tool(tool) for tool in request.tools or ())),
            parse_calls=choice != "none",
            objects_only=True,
            max_tokens=request.max_tokens,
            stop=stop_strings(request.stop_sequences),
            wishes={name: value for name, value in wishes.items() if value is not None},
        )

    def _earlier(self, request: MessagesRequest) -> tuple[Sequence[Message], Sequence[dict[str, Any]]]:
        """What was said before in the request's thread, and the tools that it began with."""
        if request.thread is None or request.thread.type == "create":
            return (), ()
        if request.system or request.tools:
            raise BadAskError(
                "system and tools are those that the thread began with: a request that continues it has none"
            )
        previous = request.thread.previous_message_id
        if previous not in self.session.conversations:
            raise UnknownThreadError(f"there is no thread with the message {previous[:80]!r} in this rollout")
        return self.session.conversations[previous]

    def delivered(self, turns: list[Turn]) -> None:
        if self.threaded:
            self.session.conversations[self.id] = (*self.ask.messages, turns[0].message), self.ask.tools

    def whole(self, call: Call, turns: list[Turn]) -> dict[str, Any]:
        (turn,) = turns
        return self._head(call.prompt_tokens, sampled_tokens(turns)) | {"content": _blocks(turn), **_ending(turn)}

    def _head(self, prompt_tokens: int, sampled: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": sampled},
        }

    def opening(self, call: Call) -> Iterator[bytes]:
        yield _event("message_start", message=self._head(call.prompt_tokens, 0))

    def said(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        for i, block in enumerate(_blocks(turns[0])):
            if block["type"] == "text":
                yield _event("content_block_start", index=i, content_block={**block, "text": ""})
                deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            else:
                yield _event("content_block_start", index=i, content_block={**block, "input": {}})
                deltas = [{"type": "input_json_delta", "partial_json": _raw(turns[0], block["id"])}]
            for delta in deltas:
                yield _event("content_block_delta", index=i, delta=delta)
            yield _event("content_block_stop", index=i)

    def closing(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        usage = {"input_tokens": call.prompt_tokens, "output_tokens": sampled_tokens(turns)}
        yield _event("message_delta", delta=_ending(turns[0]), usage=usage)
        yield _event("message_stop")

    def failed(self, fault: Fault) -> bytes:
        return event(fault.anthropic(), "error")


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _conversation(request: MessagesRequest, session: PolicySession) -> Iterator[Message]:
    if request.system:
        yield as_message({"role": "system", "content": _text_or_parts(request.system, session)})
    for message in request.messages:
        role, content = message.get("role"), message.get("content")
        if role == "user":
            yield from _user(content, session)
        elif role == "assistant":
            yield _assistant(content, session)
        elif role == "system":
            yield as_message({"role": "system", "content": _text_or_parts(content, session)})
        else:
            raise BadAskError(f"there is no role {str(role)[:40]!r}")


def _text_or_parts(content: Any, session: PolicySession) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadAskError("content is a string or a list of blocks")
    parts = [part for block in content if (part := content_part(block, session)) is not None]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _user(content: Any, session: PolicySession) -> Iterator[Message]:
    """Results of tools are messages of their own, in front of what else the user says."""
    if not isinstance(content, list):
        yield as_message({"role": "user", "content": _text_or_parts(content, session)})
        return
    results = [block for block in content if _kind(block) == "tool_result"]
    rest = [block for block in content if _kind(block) != "tool_result"]
    for result in results:
        if not isinstance(result.get("tool_use_id"), str):
            raise BadAskError("a tool_result needs a tool_use_id")
        said = _text_or_parts(result.get("content"), session)
        yield as_message({"role": "tool", "tool_call_id": result["tool_use_id"], "content": said or ""})
    if rest or not results:
        yield as_message({"role": "user", "content": _text_or_parts(rest, session)})


def _assistant(content: Any, session: PolicySession) -> Message:
    if not isinstance(content, list):
        return as_message({"role": "assistant", "content": _text_or_parts(content, session)})
    uses = [block for block in content if _kind(block) == "tool_use"]
    rest = [block for block in content if _kind(block) != "tool_use"]
    message: Message = {"role": "assistant", "content": _text_or_parts(rest, session)}
    thoughts = "".join(str(block.get("thinking") or "") for block in rest if _kind(block) == "thinking")
    if thoughts:
        message["reasoning_content"] = thoughts
    if uses:
        message["tool_calls"] = [tool_call(use.get("id"), str(use.get("name")), use.get("input")) for use in uses]
    return as_message(message)


def _kind(block: Any) -> str | None:
    if not isinstance(block, dict):
        raise BadAskError("a content block is an object")
    return block.get("type")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise BadAskError("a tool needs a name and an input_schema")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return function_tool({"type": "function", "function": function})


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": turn.content}] if turn.content else []
    return text + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in turn.calls
    ]


def _raw(turn: Turn, call_id: str) -> str:
    return next(call.raw for call in turn.calls if call.id == call_id)


def _ending(turn: Turn) -> dict[str, Any]:
    """Why the reply ended, and by which of the stop sequences."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = (
        "stop_sequence" if turn.stop is not None and turn.finish == "stop" else reasons.get(turn.finish, "end_turn")
    )
    return {"stop_reason": reason, "stop_sequence": turn.stop if reason == "stop_sequence" else None}
