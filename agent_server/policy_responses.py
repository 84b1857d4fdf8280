"""OpenAI's responses."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.messages import Message, as_message
from agentrl.policy_ask import Ask, BadAskError
from agentrl.policy_call import Call, Turn
from agentrl.policy_session import PolicySession

from .policy_chat import function_tool
from .policy_errors import Fault
from .policy_exchange import Exchange, chat_message, engine_wishes, event, pieces, refuse, sampled_tokens, tool_call


class ResponsesRequest(BaseModel):
    """`POST /v1/responses`. Fields that are not here are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


class ResponsesExchange(Exchange):
    """One response. Its conversation is kept with the session, for `previous_response_id`."""

    @staticmethod
    def error_body(fault: Fault) -> dict[str, Any]:
        return fault.openai()

    def __init__(self, body: dict[str, Any], session: PolicySession, model: str) -> None:
        super().__init__("resp_")
        request = ResponsesRequest.model_validate(body)
        refuse(conversation=request.conversation, prompt=request.prompt)
        if request.background:
            raise BadAskError("background responses are not served")
        self.request = request
        self.model = request.model or model
        self.stream = bool(request.stream)
        self.session = session
        self.conversation = [*self._earlier(), *read_items(request.input, session)]
        instructions: list[Message] = (
            [{"role": "system", "content": request.instructions}] if request.instructions else []
        )
        self.ask = Ask(
            messages=(*instructions, *self.conversation),
            tools=tuple(_tool(tool) for tool in request.tools or ()),
            parse_calls=request.tool_choice != "none",
            max_tokens=request.max_output_tokens,
            wishes=_wishes(request),
        )
        self._sequence = 0
        self._items: list[dict[str, Any]] = []

    def _earlier(self) -> list[Message]:
        previous = self.request.previous_response_id
        if previous is None:
            return []
        if previous not in self.session.conversations:
            raise BadAskError(
                f"there is no response {previous[:80]!r} in this rollout (agentrl serve policy keeps none): "
                "send the whole conversation as input"
            )
        return list(self.session.conversations[previous][0])

    def delivered(self, turns: list[Turn]) -> None:
        self.session.conversations[self.id] = (*self.conversation, turns[0].message), self.ask.tools

    def whole(self, call: Call, turns: list[Turn]) -> dict[str, Any]:
        (turn,) = turns
        self._items = self._items or _output(turn)
        sampled = sampled_tokens(turns)
        usage = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.prompt_tokens + sampled,
        }
        cut_off = turn.finish == "length"
        return self._head("incomplete" if cut_off else "completed") | {
            "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "usage": usage,
        }

    def _head(self, status: str) -> dict[str, Any]:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    # ------------------------------------------------------------------ the stream

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **data}, kind)

    def opening(self, call: Call) -> Iterator[bytes]:
        yield self._event("response.created", response=self._head("in_progress"))
        yield self._event("response.in_progress", response=self._head("in_progress"))

    def said(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        self._items = _output(turns[0])
        for i, item in enumerate(self._items):
            yield from self._text(i, item) if item["type"] == "message" else self._function(i, item)

    def _text(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        (part,) = item["content"]
        begun = {**item, "status": "in_progress", "content": []}
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.content_part.added", **where, part={**part, "text": ""})
        for piece in pieces(part["text"]):
            yield self._event("response.output_text.delta", **where, delta=piece, logprobs=[])
        yield self._event("response.output_text.done", **where, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **where, part=part)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _function(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        begun = {**item, "status": "in_progress", "arguments": ""}
        where = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
        yield self._event("response.function_call_arguments.done", **where, arguments=arguments, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def closing(self, call: Call, turns: list[Turn]) -> Iterator[bytes]:
        whole = self.whole(call, turns)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, fault: Fault) -> bytes:
        error = {"code": "server_error", "message": fault.message}
        return self._event("response.failed", response=self._head("failed") | {"error": error})


def _output(turn: Turn) -> list[dict[str, Any]]:
    """A message where there is text or nothing else, then the calls."""
    items: list[dict[str, Any]] = []
    if turn.content or not turn.calls:
        text = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        items.append(_item("message", "msg_", role="assistant", content=[text]))
    for call in turn.calls:
        items.append(_item("function_call", "fc_", call_id=call.id, name=call.name, arguments=call.raw))
    return items


def _item(kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{prefix}{uuid.uuid4().hex}", "type": kind, "status": "completed", **fields}


def _wishes(request: ResponsesRequest) -> dict[str, Any]:
    wanted = (request.text or {}).get("format") or {}
    formatted = isinstance(wanted, dict) and wanted.get("type", "text") != "text"
    wishes = {
        **engine_wishes(request.model_extra),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "response_format": wanted if formatted else None,
        "tool_choice": None if request.tool_choice in (None, "auto", "none") else request.tool_choice,
    }
    return {name: value for name, value in wishes.items() if value is not None}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The chat dialect's form of a function tool. Raises BadAskError for a hosted tool."""
    if tool.get("type") != "function":
        return function_tool(tool)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return function_tool({"type": "function", "function": function})


def read_items(items: str | Iterable[dict[str, Any]], session: PolicySession) -> list[Message]:
    """Chat messages of a response's input: calls belong to the assistant message before them, thoughts are left out."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            messages.append(_joined(chat_message(item, session)))
        elif kind == "function_call":
            call = tool_call(item.get("call_id"), str(item.get("name")), item.get("arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise BadAskError("a function_call_output needs a call_id")
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")}
            messages.append(_joined(chat_message(result, session)))
        elif kind != "reasoning":
            raise BadAskError(f"there is no input item {str(kind)[:40]!r} here")
    return messages


def _joined(message: Message) -> Message:
    """Text parts as one string."""
    content = message["content"]
    if isinstance(content, list) and all(isinstance(part, str) for part in content):
        return as_message({**message, "content": "".join(content)})
    return message
