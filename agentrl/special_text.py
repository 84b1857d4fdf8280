"""Special-token strings inside what users, tools and environments say are ordinary text, not control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .messages import Message, Text

_OPEN, _CLOSE = "\ue000", "\ue001"
_ESCAPED = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class SpecialText:
    """Escapes special-token strings before rendering and encodes the rendered text with them taken apart."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._strings = sorted(_special_strings(tokenizer), key=lambda string: (-len(string), string))
        self._pattern = re.compile("|".join(map(re.escape, self._strings))) if self._strings else None
        self._number = {string: i for i, string in enumerate(self._strings)}
        self._plain: dict[int, list[int]] = {}
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(self._strings)) if self._strings else frozenset()

    def escape(self, messages: Iterable[Message]) -> tuple[list[Message], int]:
        """(messages with each special string replaced by a private code, how many there were)."""
        count = 0

        def code(match: re.Match[str]) -> str:
            nonlocal count
            count += 1
            return f"{_OPEN}{self._number[match.group()]}{_CLOSE}"

        def clean(content: Any) -> Any:
            if self._pattern is None or content is None:
                return content
            if isinstance(content, list):
                return [Text(self._pattern.sub(code, part)) if isinstance(part, str) else part for part in content]
            return self._pattern.sub(code, content)

        return [{**message, "content": clean(message.get("content"))} for message in messages], count

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids: the template's special tokens as such, escaped strings as ordinary text; nothing is added."""
        ids: list[int] = []
        for i, piece in enumerate(_ESCAPED.split(text)):
            if i % 2:
                ids += self._as_ordinary(int(piece))
            elif piece:
                ids += self._tokenizer(piece, add_special_tokens=False).input_ids
        return tuple(ids)

    def _as_ordinary(self, number: int) -> list[int]:
        if number not in self._plain:
            encoded = self._tokenizer(self._strings[number], add_special_tokens=False, split_special_tokens=True)
            self._plain[number] = list(encoded.input_ids)
        return self._plain[number]

    def first_in(self, text: str) -> int | None:
        """Where the first special-token string starts in `text`."""
        match = self._pattern.search(text) if self._pattern else None
        return match.start() if match else None

    def strip(self, text: str) -> str:
        """`text` without its special-token strings."""
        return self._pattern.sub("", text) if self._pattern else text


def _special_strings(tokenizer: Any) -> set[str]:
    strings = {str(token) for token in tokenizer.all_special_tokens}
    strings.update(str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {string for string in strings if string}
