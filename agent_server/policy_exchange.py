"""What every dialect of the policy server does with a request: read it, and say the replies whole or as a stream."""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.messages import Message, as_message
from agentrl.policy_ask import Ask, BadAskError, arguments_value
from agentrl.policy_call import Call, Turn
from agentrl.policy_session import PolicySession

from .policy_errors import Fault

PIECES = 8
"""Pieces that a streamed text is cut into at most; it was sampled before the first is sent."""
PIECE_CHARACTERS = 16
ENGINE_OPTIONS = (
    "repetition_penalty",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "chat_template_kwargs",
)
"""vLLM's options, beside the vendors', that change what is sampled or shown."""


class Exchange(ABC):
    """One request in one dialect. The constructor reads the body and raises what `policy_errors.fault_of` knows.

    A stream is `opening` (before anything is sampled), `said` (the replies), `closing` (that it is complete: from then on the
    reply counts as delivered).
    """

    ask: Ask
    stream: bool
    model: str

    @staticmethod
    @abstractmethod
    def error_body(fault: Fault) -> dict[str, Any]:
        """An error in the dialect's shape."""

    def __init__(self, prefix: str) -> None:
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())

    @abstractmethod
    def whole(self, call: Call, turns: list[Turn]) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, call: Call) -> Iterator[bytes]: ...

    @abstractmethod
    def said(self, call: Call, turns: list[Turn]) -> Iterator[bytes]: ...

    @abstractmethod
    def closing(self, call: Call, turns: list[Turn]) -> Iterator[bytes]: ...

    @abstractmethod
    def failed(self, fault: Fault) -> bytes:
        """The event of a stream that breaks off."""

    def delivered(self, turns: list[Turn]) -> None:
        """The replies were sent in full."""
        return


def dumps(value: Any) -> str:
    """JSON in ASCII; NaN and inf, which a model may write into a call, are null: other languages refuse them."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(data)}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """The text in at most PIECES parts."""
    size = max(PIECE_CHARACTERS, -(-len(text) // PIECES))
    return (text[at : at + size] for at in range(0, len(text), size))


def sampled_tokens(turns: list[Turn]) -> int:
    return sum(len(turn.generation.token_ids) for turn in turns)


def chat_message(message: Mapping[str, Any], session: PolicySession) -> Message:
    """A message of the chat dialect, checked, with its pictures. Raises BadAskError."""
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise BadAskError(f"there is no role {str(role)[:40]!r}")
    read: Message = {"role": "system" if role == "developer" else role}
    read["content"] = _content(message.get("content"), session)
    if role == "assistant":
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise BadAskError("tool_calls must be a list")
        if calls:
            read["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            read["reasoning_content"] = reasoning
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise BadAskError("a tool message needs a tool_call_id")
        read["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return as_message(read)


def _content(content: Any, session: PolicySession) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadAskError("a message's content is a string or a list of parts")
    return [part for item in content if (part := content_part(item, session)) is not None]


def content_part(part: Any, session: PolicySession) -> Any:
    """A text or picture of any dialect; None for a part that shows nothing (a refusal, a thought). Raises BadAskError."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return part["text"]
    if (url := _picture_url(part)) is not None:
        return session.pictures.find(url)
    if kind == "image" and isinstance(part.get("source"), Mapping):
        raise BadAskError("pictures are taken as base64; no address is fetched")
    if kind in ("refusal", "thinking", "redacted_thinking", "reasoning"):
        return None
    raise BadAskError(f"not a content part: {str(kind)[:40]!r}")


def _picture_url(part: Any) -> str | None:
    """The URL of a picture's part, a data URL where the part holds the bytes themselves."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        return url if isinstance(url, str) else None
    source = part.get("source") if kind == "image" else None
    if isinstance(source, Mapping) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    return None


def picture_urls(body: Mapping[str, Any]) -> Iterator[str]:
    """Of every picture in a request, whatever its dialect."""
    for name in ("messages", "input", "content", "output"):
        items = body.get(name)
        for item in items if isinstance(items, list) else ():
            if isinstance(item, Mapping):
                url = _picture_url(item)
                yield from picture_urls(item) if url is None else (url,)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadAskError("a tool call needs an id and a function with a name")
    return tool_call(call.get("id"), function["name"], function.get("arguments"))


def tool_call(call_id: Any, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an assistant message, arguments as a JSON value. Raises BadAskError."""
    if not isinstance(call_id, str):
        raise BadAskError("a tool call needs an id")
    function = {"name": name, "arguments": arguments_value(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def engine_wishes(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a request in any dialect asks of vLLM's own options; empty values ask nothing."""
    return {name: extra[name] for name in ENGINE_OPTIONS if extra and extra.get(name) not in (None, False, [], {}, "")}


def refuse(**unheeded: Any) -> None:
    """Raises BadAskError for a field that is there and cannot be left out of account: it says what the model is shown."""
    for name, value in unheeded.items():
        if value:
            raise BadAskError(
                f"{name} is not served: the messages and tools of a request say all that the model is shown"
            )


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Stop strings of a request; empty ones stop nothing."""
    given = [stop] if isinstance(stop, str) else stop or []
    return tuple(string for string in given if string)
