"""Special-token strings inside what users, tools and environments say are ordinary text, not control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_OPEN, _CLOSE = "\ue000", "\ue001"
_ESCAPED = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
MARK, PROBE = "\ue010", "\ue011"
"""Private characters that the renderer may put into a template's input: after `escape` no message holds one."""


class SpecialText:
    """Escapes special-token strings before rendering and encodes the rendered text with them taken apart.

    `placeholders` are strings that stand for images: they are escaped too, special or not.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        special = _special_strings(tokenizer)
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(special)))
        self._special = _any_of(special)
        self._counted = special | set(placeholders)
        self._strings = sorted(self._counted | {_OPEN, MARK, PROBE}, key=lambda string: (-len(string), string))
        self._number = {string: i for i, string in enumerate(self._strings)}
        self._escapable = _any_of(self._strings)
        self._controls = self.ids | set(tokenizer.convert_tokens_to_ids(sorted(placeholders)))
        self._plain: dict[int, list[int]] = {}

    def escape(self, said: Sequence[Any]) -> tuple[list[Any], int]:
        """(messages or tools with each special string anywhere in them replaced by a private code, how many there were)."""
        count = 0

        def code(match: re.Match[str]) -> str:
            nonlocal count
            count += match.group() in self._counted
            return f"{_OPEN}{self._number[match.group()]}{_CLOSE}"

        def clean(value: Any) -> Any:
            if isinstance(value, str):
                return self._escapable.sub(code, value)
            if isinstance(value, dict):
                return {clean(key): clean(item) for key, item in value.items()}
            return [clean(item) for item in value] if isinstance(value, list | tuple) else value

        return [clean(item) for item in said], count

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids: the template's special tokens as such, escaped strings as ordinary text; nothing is added."""
        ids: list[int] = []
        for i, piece in enumerate(_ESCAPED.split(encodable(text))):
            if i % 2:
                ids += self._as_ordinary(int(piece))
            elif piece:
                ids += self._tokenizer(piece, add_special_tokens=False).input_ids
        return tuple(ids)

    def _as_ordinary(self, number: int) -> list[int]:
        if number not in self._plain:
            string = self._strings[number]
            ids = self._ordinary_ids(string)
            if self._controls.intersection(ids):
                ids = self._ordinary_ids(string[:1]) + self._ordinary_ids(string[1:])
            self._plain[number] = ids
        return self._plain[number]

    def _ordinary_ids(self, string: str) -> list[int]:
        return list(self._tokenizer(string, add_special_tokens=False, split_special_tokens=True).input_ids)

    def first_in(self, text: str) -> int | None:
        """Where the first special-token string starts in `text`."""
        match = self._special.search(text)
        return match.start() if match else None

    def starts(self, text: str) -> list[int]:
        """Where special-token strings start in `text`."""
        return [match.start() for match in self._special.finditer(text)]

    def leading(self, text: str) -> str:
        """The special-token string that `text` begins with, '' without one."""
        match = self._special.match(text)
        return match.group() if match else ""

    def strip(self, text: str) -> str:
        """`text` without its special-token strings."""
        return self._special.sub("", text)


def encodable(text: str) -> str:
    """`text` with what UTF-8 cannot hold (half a surrogate pair, which JSON can spell) replaced by '?'."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the strings; nothing when there are none."""
    longest_first = sorted(strings, key=lambda string: (-len(string), string))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _special_strings(tokenizer: Any) -> set[str]:
    strings = {str(token) for token in tokenizer.all_special_tokens}
    strings.update(str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {string for string in strings if string}
