"""What an agent asks of the policy, in whatever dialect it came, and when two messages are the same.

A conversation is known by a chain of digests, one a message, so that the longest known prefix of a request is found in time
linear in the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import json_bounds
from .errors import AgentError, DataError
from .messages import Image, Message

NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""The values of sampling options that leave the distribution as it is; of any other option None does."""
FORMAT = "response_format"
TEMPLATE_ONLY = ("tool_choice", FORMAT)
"""Wishes that a template may heed and that nothing enforces; the format of a reply that is not trained is."""


class BadAskError(DataError):
    """A request that the policy cannot answer as it is; the message is for the agent's author."""


class ContextLengthError(AgentError):
    """The turn or token budget of the rollout is used up."""


class SessionEndedError(AgentError):
    """The rollout is over; nothing is sampled for it any more."""


@dataclass(frozen=True)
class Ask:
    """One request. `messages` are normalised (`as_message`), `tools` OpenAI function schemas; `stop` adds to the stop ids.

    `parse_calls` False = tool calls stay text (tool_choice none); `objects_only` = so do calls whose arguments are no JSON
    object, as the dialect cannot say them. `wishes` = what was asked of the distribution, by OpenAI's
    names, absent where the request did not say.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    parse_calls: bool = True
    objects_only: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    wishes: Mapping[str, Any] = field(default_factory=dict)


def json_schema(wanted: Any) -> str:
    """The JSON schema, as text, of a `response_format` in whatever dialect. Raises BadAskError for a format of another kind."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    named = wanted.get("json_schema", wanted) if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise BadAskError("a response format is of type json_object, or json_schema with its schema")
    return json.dumps(schema)


def chain(messages: Iterable[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Entry i stands for the tools and the first i messages; equal conversations have equal entries."""
    links = [_digest(b"", [canonical(tool) for tool in tools])]
    for message in messages:
        links.append(following(links[-1], message))
    return links


def following(link: bytes, message: Message) -> bytes:
    """The entry after `link` when `message` comes next."""
    return _digest(link, message_key(message))


def _digest(link: bytes, key: Any) -> bytes:
    text = json.dumps(key, ensure_ascii=True, sort_keys=True)
    return hashlib.blake2b(link + text.encode(), digest_size=16).digest()


def message_key(message: Message) -> list[Any]:
    """What makes two messages the same: role, text joined with None as '', pictures, tool calls with their arguments as JSON
    values, reasoning only where there is some, and the name of whoever is not the policy, which has none.
    """
    calls = [_call_key(call) for call in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    named = {} if message["role"] == "assistant" else {"name": message.get("name")}
    spoken = [message["role"], _content_key(message.get("content")), calls]
    return [*spoken, message.get("tool_call_id") or "", reasoning, named.get("name") or ""]


def _content_key(content: Any) -> list[Any]:
    """Texts and pictures in order, neighbouring texts joined, empty ones left out."""
    key: list[Any] = []
    for part in content if isinstance(content, list) else [content or ""]:
        if isinstance(part, Image):
            key.append([part.sha256])
        elif key and isinstance(key[-1], str):
            key[-1] += str(part)
        elif part:
            key.append(str(part))
    return key


def _call_key(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    return [call.get("id") or "", function.get("name"), canonical(arguments_value(function.get("arguments")))]


def arguments_value(arguments: Any) -> Any:
    """A call's arguments as a JSON value; text that is no JSON, or nested too deep, stays text, none at all is an empty
    object.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json_bounds.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def canonical(value: Any) -> Any:
    """A JSON value in which 1.0 and 1 are the same: some clients print one for the other. True and 1 are not."""
    try:
        return _canonical(value)
    except RecursionError:
        return "too deep"


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else repr(value)
    return value


def changes_distribution(wishes: Mapping[str, Any], temperature: float) -> dict[str, str]:
    """Name, and `name = value`, of every wish that differs from plain sampling at `temperature`; a seed changes nothing."""
    neutral = {**NEUTRAL, "temperature": (temperature,)}
    return {
        name: f"{name} = {repr(value)[:80]}"
        for name, value in wishes.items()
        if value is not None and name not in (*TEMPLATE_ONLY, "seed") and value not in neutral.get(name, ())
    }
