"""Hermes' tool-call syntax, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, read with json alone."""

from __future__ import annotations

import json
import uuid
from typing import Any

from .. import json_bounds
from ..messages import ToolCall

START, END = "<tool_call>", "</tool_call>"


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """(text before the first call, the calls). A block that is no call is one malformed call: name '', arguments None."""
    before, *blocks = text.split(START)
    return before.strip() if blocks else text, [_call(block.partition(END)[0].strip()) for block in blocks]


def _call(block: str) -> ToolCall:
    try:
        parsed = json_bounds.loads(block)
    except ValueError:
        return malformed_call(block)
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return malformed_call(block)
    return tool_call(parsed["name"], parsed.get("arguments"))


def tool_call(name: str, arguments: Any) -> ToolCall:
    """A call from a name and its arguments, as an object or as JSON text. Anything but an object gives None."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        value = json_bounds.loads(raw)
    except ValueError:
        value = None
    return ToolCall(new_call_id(), name, value if isinstance(value, dict) else None, raw)


def malformed_call(raw: str) -> ToolCall:
    """What the model wrote in place of a call."""
    return ToolCall(new_call_id(), "", None, raw)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:16]}"
