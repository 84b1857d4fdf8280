"""What lines of JSON hold that are no rows, and what files hold that are no such lines."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

from ..errors import DataError

MARK = "\ufdd0\ufdd1"
"""Two characters that no text has, before the two hexadecimal digits of a byte that is no UTF-8."""
MARKING = "agentrl.marked"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def mark_bytes() -> str:
    """The name of a way to decode in which bytes that are no UTF-8 are marked; it is known to `open` from now on."""
    codecs.register_error(MARKING, _marked)
    return MARKING


def _marked(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return MARK + error.object[error.start : error.start + 1].hex(), error.start + 1


def check_encoding(place: Path) -> None:
    """Raises DataError for the text of a file in UTF-16 or UTF-32."""
    with place.open("rb") as file:
        start = file.read(4)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or 0 in start:
        raise DataError(f"--data.path {place} is UTF-16 or UTF-32: save it as UTF-8")


def read_line(line: str) -> Any:
    """The value of a line. Raises ValueError or RecursionError."""
    return json.loads(line.removeprefix("\ufeff"))


def not_a_row(value: Any, text: str) -> str:
    """What is wrong with a value as a row, empty for nothing. `text` is the JSON it is from."""
    if not isinstance(value, dict):
        return f"{repr(value)[:60]} is no object with columns"
    if not SURROGATE.search(text):
        return ""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"no text: there is half of a surrogate pair in it, \\u{ord(error.object[error.start]):04x}"
    return ""


def not_lines(text: str, column: str) -> str:
    """What a file is instead of rows of one line each, empty where nothing better is known than what each line is not.
    `column` is one that its rows ought to have.
    """
    text = text.removeprefix("\ufeff").strip()
    if not text:
        return "there are only blank lines in it"
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, list) and end == len(text):
        return "it is a list: give the file the ending .json, or write one row a line"
    if not isinstance(value, dict):
        return ""
    inside = (
        next((name for name, held in value.items() if _holds_rows(held, column)), None) if end == len(text) else None
    )
    if inside is not None:
        return f"it is one object, with a list in {inside!r}: if those are the rows, write that list alone"
    return "it has objects over several lines: write one row a line, or a list of them" if "\n" in text[:end] else ""


def _holds_rows(value: Any, column: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and column in value[0]
