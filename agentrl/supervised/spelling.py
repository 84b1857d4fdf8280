"""Whole conversations as token ids, and which of them the assistant said.

Where a turn is, is read off the rendering of the whole conversation: it is rendered once more with a marker in the turn's
place, and what differs is the turn. So whatever a template does to earlier turns, what is trained is what stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..chat_template import RefusedError
from ..errors import DataError
from ..messages import Image, Message, as_message, message_images, message_text
from ..renderer import MARKER, SAID, Renderer, with_marked_call
from ..trajectory import ImageSlot

Span = tuple[int, int]


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
        self._special = renderer.special

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
        pieces = self._literal(messages) if self._template.literal else self._rendered(messages, list(tools), turns)
        return self._joined([(ids, turn in wanted) for ids, turn in pieces], images)

    def plain(self, text: str) -> Spelling:
        """A text as it is, all of it trained but the tokenizer's leading tokens and the first, which nothing predicts."""
        ids = (*self._renderer.plain_ids(text), *self._end())
        return Spelling(ids, (False, *[True] * (len(ids) - 1)))

    # ------------------------------------------------------------------ without a template

    def _literal(self, messages: Sequence[Message]) -> list[tuple[tuple[int, ...], int | None]]:
        pieces: list[tuple[tuple[int, ...], int | None]] = []
        for i, message in enumerate(messages):
            text = self._template.render([message], ())
            ids = self._template.later_ids(text) if i else self._template.first_ids(text)
            spoken = message["role"] == "assistant"
            pieces.append(((*ids, *self._end()) if spoken else ids, i if spoken else None))
        return pieces

    def _end(self) -> tuple[int, ...]:
        eos = self._renderer.tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    # ------------------------------------------------------------------ with one

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], turns: Sequence[int]
    ) -> list[tuple[tuple[int, ...], int | None]]:
        """(ids, turn that they are) of every piece; None = the assistant did not say it."""
        safe, _ = self._special.escape(messages)
        safe_tools, _ = self._special.escape(tools)
        try:
            whole = self._template.render(safe, safe_tools, reply=False)
        except RefusedError as error:
            raise DataError(str(error)) from error
        pieces: list[tuple[tuple[int, ...], int | None]] = []
        at = 0
        for turn in turns:
            start, end = self._span(whole, safe, safe_tools, turn, at)
            pieces += [(self._special.encode(whole[at:start]), None), (self._special.encode(whole[start:end]), turn)]
            at = end
        if turns and turns[-1] == len(messages) - 1 and not self._ended(whole[:at]):
            pieces.append((self._end(), turns[-1]))
        return [*pieces, (self._special.encode(whole[at:]), None)]

    def _span(self, whole: str, messages: list[Message], tools: list[Any], turn: int, after: int) -> Span:
        """Where a turn stands in the whole: from what the generation prompt leaves to the model, to its end token."""
        marked, of_call = self._marked(messages, tools, turn)
        before, found, rest = marked.partition(MARKER)
        if of_call:
            rest = rest[self._special.first_in(rest) or 0 :]
        if not found or MARKER in rest or not whole.endswith(rest):
            raise DataError(
                f"message {turn}: the chat template does not show where this turn of the assistant is; "
                "give one that does with --model.chat-template."
            )
        start, end = _shared(whole, before), len(whole) - len(rest)
        header = whole.rfind(self._header, after, start) if self._header else -1
        start = header + len(self._header) if header >= 0 else max(start, after)
        self._check_calls(messages[turn], whole[start:end], turn)
        return start, self._turn_end(whole, max(start, end), of_call)

    def _check_calls(self, message: Message, text: str, turn: int) -> None:
        for call in message.get("tool_calls") or ():
            name = call.get("function", call).get("name")
            if str(name) not in text:
                raise DataError(f"message {turn}: the chat template does not show the call of {name!r}.")

    def _marked(self, messages: list[Message], tools: list[Any], turn: int) -> tuple[str, bool]:
        """The rendering with the marker for the turn, and whether it had to be put inside the turn's last call: some
        templates take a tool's answer only after its call.
        """
        changes = [(SAID, False)]
        if messages[turn].get("tool_calls"):
            changes.append((with_marked_call(messages[turn]), True))
        for said, of_call in changes:
            try:
                text = self._template.render([*messages[:turn], said, *messages[turn + 1 :]], tools, reply=False)
                return text, of_call
            except RefusedError as error:
                refusal = error
        raise DataError(f"message {turn}: {refusal}") from refusal

    def _turn_end(self, whole: str, end: int, of_call: bool) -> int:
        """After the token that ends a turn whose words end at `end`; whatever token is there is it for the end of a call."""
        rest = whole[end:]
        token = self._special.leading(rest.lstrip())
        if not token or not (of_call or token in self._closers):
            return end
        return end + len(rest) - len(rest.lstrip()) + len(token)

    def _ended(self, text: str) -> bool:
        return any(text.endswith(token) for token in self._closers)

    @cached_property
    def _header(self) -> str:
        """What the template puts before a reply."""
        asked: list[Message] = [{"role": "user", "content": "x"}]
        try:
            bare, ready = (self._template.render(asked, (), reply=reply) for reply in (False, True))
        except RefusedError:
            return ""
        return ready[len(bare) :] if ready.startswith(bare) else ""

    @cached_property
    def _closers(self) -> frozenset[str]:
        """The special tokens that a turn ends with: before another turn, at the end, or when a reply is sampled."""
        tokens = {self._renderer.text([i], special=True) for i in self._renderer.stop_ids}
        opening: list[Message] = [{"role": "user", "content": "x"}, SAID]
        for following in ([], [{"role": "user", "content": "y"}]):
            try:
                text = self._template.render([*opening, *following], (), reply=False)
            except RefusedError:
                continue
            tokens.add(self._special.leading(text.partition(MARKER)[2].lstrip()))
        return frozenset(tokens - {""})

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


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if one.startswith(other):
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def said(message: Message) -> bool:
    """Whether an assistant's message says or calls anything."""
    return bool(message_text(message).strip() or message.get("tool_calls"))
