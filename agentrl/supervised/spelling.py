"""Whole conversations as token ids, and which of them the assistant said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..messages import Image, Message, as_message, message_images, message_text
from ..renderer import Renderer
from ..trajectory import ImageSlot
from .turns import Piece, Turns, end_of_text


@dataclass(frozen=True)
class Spelling:
    """A conversation in ids, images expanded, up to the last token that is trained. `trained[i]` = token i is."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    slots: tuple[ImageSlot, ...] = ()
    images: tuple[Image, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Spelling:
        """The first `length` tokens, fewer where that would cut a picture apart, and nothing after the last trained one."""
        inside = [start for _, start, count in self.slots if start < length < start + count]
        length = min([length, *inside])
        end = max((i + 1 for i in range(min(length, len(self))) if self.trained[i]), default=0)
        kept = sum(start < end for _, start, _ in self.slots)
        return Spelling(self.token_ids[:end], self.trained[:end], self.slots[:kept], self.images[:kept])


class Speller:
    """Spells conversations for one tokenizer or processor, each piece of text as a rollout's prompts and deltas are."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._template = renderer.template
        self._turns = Turns(renderer)

    def spell(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, last_only: bool = False
    ) -> Spelling:
        """The assistant's turns are trained, each with the token that ends it, but not those with `"weight": 0`; of them the
        last alone, whatever it says, or those that say anything. Raises DataError for a conversation that the template
        refuses, and for another weight.
        """
        messages = [as_message(message) for message in messages]
        images = message_images(messages)
        self._renderer.expander.check(images)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        weights = [_weight(message, i) for i, message in enumerate(messages)]
        among = turns[-1:] if last_only else [i for i in turns if said(messages[i])]
        wanted = {i for i in among if weights[i]}
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        pieces = self._literal(messages) if self._template.literal else self._turns.pieces(messages, tools, turns)
        return self._joined([(ids, turn in wanted) for ids, turn in pieces], images)

    def plain(self, text: str) -> Spelling:
        """A text as it is, all of it trained but the tokenizer's leading tokens and the first, which nothing predicts."""
        ids = (*self._renderer.plain_ids(text), *end_of_text(self._renderer))
        return Spelling(ids, (False, *[True] * (len(ids) - 1)))

    # ------------------------------------------------------------------ without a template

    def _literal(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for i, message in enumerate(messages):
            text = self._template.render([message], ())
            ids = self._template.later_ids(text) if i else self._template.first_ids(text)
            spoken = message["role"] == "assistant"
            pieces.append(((*ids, *end_of_text(self._renderer)) if spoken else ids, i if spoken else None))
        return pieces

    # ------------------------------------------------------------------ ids

    def _joined(self, pieces: Sequence[tuple[tuple[int, ...], bool]], images: Sequence[Image]) -> Spelling:
        """The pieces with their pictures expanded, up to the last trained token. The first token is never trained."""
        expander, rest = self._renderer.expander, list(images)
        ids: list[int] = []
        trained: list[bool] = []
        slots: list[ImageSlot] = []
        for piece, wanted in pieces:
            places = sum(i in expander.placeholder_ids for i in piece)
            expanded, found = expander.expand(piece, rest[:places])
            slots += [(sha, len(ids) + start, count) for sha, start, count in found]
            ids += expanded
            trained += [wanted] * len(expanded)
            rest = rest[places:]
        if rest:
            raise DataError(
                f"the chat template left out {len(rest)} of {len(images)} images: is it a template for images?"
            )
        if trained:
            trained[0] = False
        return Spelling(tuple(ids), tuple(trained), tuple(slots), tuple(images)).cut(len(ids))


def _weight(message: Message, turn: int) -> bool:
    """Whether a message's own weight lets it be trained: 1 or true, which is the default, or 0 or false. Raises DataError."""
    weight = message.get("weight", 1)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise DataError(f"message {turn}: its weight is {repr(weight)[:60]}; it is 0 or 1, or false or true")
    return bool(weight)


def said(message: Message) -> bool:
    """Whether an assistant's message says or calls anything."""
    return bool(message_text(message).strip() or message.get("tool_calls"))
