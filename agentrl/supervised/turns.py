"""Where the assistant's turns stand in a conversation as its chat template renders it.

It is rendered once more with a marker in the turn's place, and what differs is the turn. So whatever a template does to earlier
turns, what is found is what stands there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..chat_template import PROBE_CALL, RefusedError
from ..errors import DataError
from ..messages import Message
from ..renderer import MARKER, SAID, Renderer, with_marked_call
from ..special_text import PROBE

Span = tuple[int, int]
Piece = tuple[tuple[int, ...], int | None]
"""(ids, the number of the message that they are); None = the assistant did not say them."""


class Turns:
    """Finds turns for one template, and encodes each piece of text as a rollout's prompts and deltas are."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._template = renderer.template
        self._special = renderer.special

    def pieces(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], turns: Sequence[int]) -> list[Piece]:
        """The whole conversation; `turns` = the numbers of the assistant's messages. Raises DataError."""
        safe, _ = self._special.escape(messages)
        safe_tools, _ = self._special.escape(tools)
        try:
            whole = self._template.render(safe, safe_tools, reply=False)
        except RefusedError as error:
            raise DataError(str(error)) from error
        pieces: list[Piece] = []
        at = 0
        for turn in turns:
            start, end = self._span(whole, safe, safe_tools, turn, at)
            pieces.append((self._special.encode(whole[at:start]), None))
            pieces += self._said(whole, safe, safe_tools, turn, (start, end))
            at = end
        if turns and turns[-1] == len(messages) - 1 and not self._ended(whole[:at]):
            pieces.append((end_of_text(self._renderer), turns[-1]))
        return [*pieces, (self._special.encode(whole[at:]), None)]

    def _span(self, whole: str, messages: list[Message], tools: list[Any], turn: int, after: int) -> Span:
        """Where a turn stands in the whole: from what the generation prompt leaves to the model, to its end token."""
        for marked, of_call in self._marked(messages, tools, turn):
            before, found, rest = marked.partition(MARKER)
            tail = self._tail(whole, rest, of_call)
            if found and tail is not None:
                end, shared = len(whole) - tail, _shared(whole, before)
                start = self._begin(whole, messages[:turn], tools, after, shared, of_call)
                self._check_calls(messages[turn], whole[start:end], turn)
                return start, self._turn_end(whole, max(start, end), of_call)
        raise DataError(
            f"message {turn}: the chat template does not show where this turn of the assistant is; "
            "give one that does with --model.chat-template."
        )

    def _tail(self, whole: str, rest: str, of_call: bool) -> int | None:
        """The length of what follows the turn, of which `rest` follows the marker; None where the two do not fit. After a
        call it begins with a special token, as what closes an argument depends on the argument.
        """
        starts = self._special.starts(rest) if of_call else []
        fitting = (len(rest) - start for start in starts or [0] if whole.endswith(rest[start:]))
        return None if MARKER in rest else next(fitting, None)

    def _begin(
        self, whole: str, before: list[Message], tools: list[Any], after: int, shared: int, of_call: bool
    ) -> int:
        """Where the prompt of a rollout would end: after the last header before the turn's words, which begin at `shared` at
        the earliest. Of a template without headers it is the space before them, or all of a call, that the prompt lacks.
        """
        start = max(shared, after)
        if self._header:
            header = whole.rfind(self._header, after, shared + len(self._header) - 1)
            return header + len(self._header) if header >= 0 else start
        try:
            prompt = self._template.render(before, tools)
        except RefusedError:
            return start
        fits = after <= len(prompt) < start and whole.startswith(prompt)
        return len(prompt) if fits and (of_call or whole[len(prompt) : start].isspace()) else start

    def _said(self, whole: str, messages: list[Message], tools: list[Any], turn: int, span: Span) -> list[Piece]:
        """The pieces of a turn's span. Some templates show in it what tools answered (Gemma 4): the assistant's is then what the
        rendering without their messages begins and ends with too.
        """
        start, end = span
        ids, later = self._special.encode(whole[start:end]), messages[turn + 1 :]
        rest = list(itertools.dropwhile(lambda message: message["role"] == "tool", later))
        if len(rest) == len(later) or not self._answers_inside:
            return [(ids, turn)]
        try:
            bare = self._template.render([*messages[: turn + 1], *rest], tools, reply=False)
        except RefusedError as error:
            raise DataError(f"message {turn}: the template shows what tools answered in this turn: {error}") from error
        ends = len(bare) - len(whole) + end if bare.endswith(whole[end:]) else len(bare)
        own = self._special.encode(bare[start:ends]) if bare.startswith(whole[:start]) else ()
        first = _shared(ids, own)
        last = _shared(ids[first:][::-1], own[first:][::-1]) if ends < len(bare) else 0
        stop = len(ids) - last
        return [(ids[:first], turn), (ids[first:stop], None), (ids[stop:], turn)]

    def _check_calls(self, message: Message, text: str, turn: int) -> None:
        for call in message.get("tool_calls") or ():
            name = call.get("function", call).get("name")
            if str(name) not in text:
                raise DataError(f"message {turn}: the chat template does not show the call of {name!r}.")

    def _marked(self, messages: list[Message], tools: list[Any], turn: int) -> Iterator[tuple[str, bool]]:
        """Renderings with a marker for the turn, and whether it is inside the turn's last call: some templates take a tool's
        answer only after its call, or show it there. Raises DataError when the template refuses them.
        """
        changes = [(SAID, False)]
        if messages[turn].get("tool_calls"):
            changes.append((with_marked_call(messages[turn]), True))
        for number, (said, of_call) in enumerate(changes, 1):
            try:
                yield (
                    self._template.render([*messages[:turn], said, *messages[turn + 1 :]], tools, reply=False),
                    of_call,
                )
            except RefusedError as error:
                if number == len(changes):
                    raise DataError(f"message {turn}: {error}") from error

    def _turn_end(self, whole: str, end: int, of_call: bool) -> int:
        """After the token that ends a turn whose words end at `end`, and those that end a reply and follow it at once;
        whatever token is there is it for the end of a call.
        """
        rest = whole[end:]
        token = self._special.leading(rest.lstrip())
        if not token or not (of_call or token in self._closers):
            return end
        end += len(rest) - len(rest.lstrip()) + len(token)
        while (token := self._special.leading(whole[end:])) in self._stops:
            end += len(token)
        return end

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
        tokens = set(self._stops)
        opening: list[Message] = [{"role": "user", "content": "x"}, SAID]
        for following in ([], [{"role": "user", "content": "y"}]):
            try:
                text = self._template.render([*opening, *following], (), reply=False)
            except RefusedError:
                continue
            tokens.add(self._special.leading(text.partition(MARKER)[2].lstrip()))
        return frozenset(tokens - {""})

    @cached_property
    def _stops(self) -> frozenset[str]:
        """The special tokens at which sampling stops."""
        return frozenset(self._renderer.text([i], special=True) for i in self._renderer.stop_ids) - {""}

    @cached_property
    def _answers_inside(self) -> bool:
        """Whether the template shows what a tool answered within the turn of the assistant that called it."""
        called: Message = {"role": "assistant", "content": "z", "tool_calls": [PROBE_CALL]}
        answered = {"role": "tool", "tool_call_id": PROBE_CALL["id"], "name": "probe_name", "content": PROBE}
        messages: list[Message] = [{"role": "user", "content": "x"}, called, answered]
        try:
            whole = self._template.render(messages, (), reply=False)
            start, end = self._span(whole, messages, [], 1, 0)
        except (RefusedError, DataError):
            return False
        return PROBE in whole[start:end]


def end_of_text(renderer: Renderer) -> tuple[int, ...]:
    """The tokenizer's end of sequence, where it has one."""
    eos = renderer.tokenizer.eos_token_id
    return () if eos is None else (int(eos),)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or ids, two sequences begin with alike."""
    if one[: len(other)] == other:
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
