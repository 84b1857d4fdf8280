"""JSON from outside, bounded before it is read: nested deeply it ends recursions, and a few bytes a value fill the memory."""

from __future__ import annotations

import json
import re
from typing import Any

DEPTH = 64
"""Nested arrays and objects in a JSON text."""
TOKENS = 2**19
"""Texts, arrays, objects and commas in a JSON text: about a quarter of a second to count and to read."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{,]|[\]}]', re.DOTALL)


def json_fault(text: str | bytes, depth: int = DEPTH, tokens: int = TOKENS) -> str | None:
    """What is too much in a JSON text, in words; None for one that may be read. What stands in strings does not count."""
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened <= depth and len(text) <= tokens:
        return None
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if opened <= depth and opened + raw.count(b",") + raw.count(b'"') <= tokens:
        return None
    deep = seen = 0
    for found in _TOKEN.finditer(raw):
        first = raw[found.start()]
        deep += (first in b"[{") - (first in b"]}")
        seen += first not in b"]}"
        if deep > depth:
            return f"the JSON is nested deeper than {depth}"
        if seen > tokens:
            return f"the JSON has more than {tokens} values"
    return None


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON, or too much of it."""
    fault = json_fault(text)
    if fault is not None:
        raise ValueError(fault)
    return json.loads(text)
