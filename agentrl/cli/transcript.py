"""Messages as lines for a person to read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..messages import Image, Message

LONGEST_TEXT = 2000


def transcript(messages: Iterable[Message]) -> list[str]:
    """Every message under its role; pictures as their hash, and size where it is known, tool calls as they were made, long
    texts cut.
    """
    return [line for message in messages for line in _message(message)]


def _message(message: Message) -> list[str]:
    answers = f" ({message['tool_call_id']})" if "tool_call_id" in message else ""
    lines = [f"[{message['role']}{answers}]"]
    content = message.get("content")
    parts = content if isinstance(content, list) else [content or ""]
    lines += [f"  {line}" for part in parts for line in _part(part)]
    lines += [f"  -> {_call(call)}" for call in message.get("tool_calls") or ()]
    return lines


def _part(part: Any) -> list[str]:
    if isinstance(part, Image):
        width, height = part.size
        return [f"<image {width}x{height} {part.sha256[:12]}>"]
    if isinstance(part, dict) and part.get("type") == "image":
        return [f"<image {part.get('sha256', '')[:12]}>"]
    text = str(part)
    shown = text[:LONGEST_TEXT] + (f" … ({len(text)} characters)" if len(text) > LONGEST_TEXT else "")
    return [_printable(line) for line in shown.splitlines()]


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _printable(f"{function['name'] or '(malformed call)'} {shown}")


def _printable(text: str) -> str:
    """Control characters, which could drive the terminal, as escapes."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)
