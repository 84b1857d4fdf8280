"""Chat messages to token ids, extended turn by turn and never rendered again.

`start` renders a conversation once. `extend` appends what the engine sampled, id for id, and the *delta*: the text that
the chat template puts between an assistant turn and the next generation. The delta is read off a short rendering in which
a marker stands for the assistant's content, so its cost does not grow with the episode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from . import json_bounds
from .chat_template import ChatTemplate, RefusedError
from .engine import Generation
from .errors import DataError
from .image_expansion import ImageExpander
from .messages import Image, Message, as_message, message_images, message_text
from .special_text import MARK, PROBE, SpecialText, encodable
from .trajectory import ImageSlot

MARKER = f"{MARK}assistant{MARK}"
SAID: Message = {"role": "assistant", "content": MARKER}
"""The assistant's turn with the marker for its content."""
EARLIER: tuple[Message, ...] = ({"role": "assistant", "content": "z"}, {"role": "user", "content": "w"})
"""What stands between the first user message and `SAID` in a history of two turns."""


@dataclass(frozen=True)
class Prompt:
    """A context ready to sample from. `token_ids` have every image expanded; `slots` say where, `images` are in order.

    `kept` = how many leading tokens are those of the prompt and sample it extends; 0 for a first or a branched prompt,
    `branched` tells the two apart. `escaped` counts special-token strings that were taken as ordinary text in the new part.
    """

    token_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    slots: tuple[ImageSlot, ...] = ()
    messages: tuple[Message, ...] = field(default=(), repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    """What was rendered and sampled so far; kept up for `history="branch"` alone."""
    kept: int = 0
    branched: bool = False
    escaped: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class Renderer:
    """Renders for one tokenizer or processor; holds no state of any episode, so one serves many.

    chat_template: "auto" (the tokenizer's own), "none" (contents joined as they are, special tokens and all), or the path
    of a jinja file. history: "append" keeps what was sampled where the template would rewrite it, "branch" follows the
    template into a new root. `stop_ids` end a turn: the tokenizer's end of sequence, the template's end of turn, and
    those given. Raises ConfigError when there is no template and none was waived.
    """

    def __init__(
        self,
        tokenizer_or_processor: Any,
        *,
        history: str = "append",
        chat_template: str = "auto",
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.template = ChatTemplate(tokenizer_or_processor, chat_template)
        self.tokenizer = self.template.tokenizer
        self.history = history
        self.expander = ImageExpander(tokenizer_or_processor)
        self.special = SpecialText(self.tokenizer, self.expander.placeholders)
        self.seen: Callable[[Prompt], None] | None = None
        """Told of every prompt that is made, for an engine that must know what was said."""
        self._shown: set[tuple[bool, tuple[str, ...]]] = set()
        self._user_delta = None if self.template.literal else self._same_delta_after_one_and_two_turns()
        self.stop_ids = tuple(sorted({*stop_ids, *self._own_stop_ids()}))

    # ------------------------------------------------------------------ the public three

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Prompt:
        """The first prompt of a conversation, ready for the assistant. Raises DataError when the template refuses it."""
        messages = [as_message(message) for message in messages]
        images = message_images(messages)
        self.expander.check(images)
        safe, escaped = self._escape(messages)
        safe_tools, escaped_tools = self._escape(tools)
        try:
            text = self.template.render(safe, safe_tools)
        except RefusedError as error:
            raise DataError(str(error)) from error
        ids = self.template.first_ids(text) if self.template.literal else self.special.encode(text)
        base = Prompt((), messages=tuple(messages), tools=tuple(tools), text=text, escaped=escaped + escaped_tools)
        return self._with_images(base, ids, images)

    def extend(self, prompt: Prompt, generation: Generation, messages: Sequence[Message]) -> Prompt:
        """prompt + the sampled ids + the delta of `messages`.

        `messages` may begin with the assistant message that the sample was parsed into (with its `tool_calls`); the rest
        is what the environment said. All of it is one delta. Raises DataError when the template refuses them altogether.
        """
        reply, new = self._split(generation, [as_message(message) for message in messages])
        images = message_images(new)
        self.expander.check(images)
        history = (*prompt.messages, reply, *new)
        safe, escaped = self._escape(new)
        delta = self._delta(prompt, generation, reply, safe)
        if delta is None:
            return replace(self.start(history, prompt.tools), branched=True, escaped=escaped)
        sampled = tuple(generation.token_ids)
        base = replace(
            prompt,
            messages=history,
            text=self._said_so_far(prompt, generation) + delta if self.history == "branch" else "",
            kept=len(prompt.token_ids) + len(sampled),
            branched=False,
            escaped=escaped,
        )
        return self._with_images(base, self._delta_ids(sampled, delta), images, sampled)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text that is no message, after the tokenizer's own leading tokens."""
        return self.template.first_ids(text)

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of sampled ids; special tokens (and a stop id's text) are left out unless asked for."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def strip_special(self, text: str) -> str:
        """`text` without special-token strings."""
        return self.special.strip(text)

    def exceeds(self, messages: Sequence[Message], tokens: int) -> bool:
        """Whether their text is sure to take more than `tokens` tokens. Told by its length, as tokenising megabytes would
        hold up every other episode.
        """
        return sum(len(message_text(message)) for message in messages) > tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Characters that no token stands for more of; at least 256, as an unknown word may be one token."""
        return max(256, *map(len, self.tokenizer.get_vocab()))

    def count_images(self, images: Sequence[Image]) -> int:
        """How many tokens these images take once expanded."""
        return sum(len(self.expander.expansion(image)) for image in images)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids that stand for image features: never to be sampled by a model."""
        return self.expander.placeholder_ids

    def literal(self, text: str, images: Sequence[Image] = ()) -> tuple[tuple[int, ...], tuple[ImageSlot, ...]]:
        """(ids of a text as it is, its special-token strings being special tokens, with each image placeholder in it expanded;
        the slot of each image). Nothing is added. Raises DataError unless there is one placeholder an image.
        """
        self.expander.check(images)
        ids = self.tokenizer(encodable(text), add_special_tokens=False).input_ids
        return self.expander.expand(ids, images)

    def slots(self, token_ids: Sequence[int], images: Sequence[Image]) -> tuple[ImageSlot, ...]:
        """Where the images stand in ids that have them expanded. Raises DataError when they do not."""
        return self.expander.find(token_ids, images)

    # ------------------------------------------------------------------ the delta

    def _split(self, generation: Generation, messages: list[Message]) -> tuple[Message, list[Message]]:
        if messages and messages[0]["role"] == "assistant":
            return messages[0], messages[1:]
        return {"role": "assistant", "content": self.text(generation.token_ids)}, messages

    def _delta(self, prompt: Prompt, generation: Generation, reply: Message, new: list[Message]) -> str | None:
        """The text after the assistant's turn up to the next generation; None = the template demands a branch."""
        if self.template.literal:
            return self.template.render(new, ())
        if self.history == "branch":
            return self._delta_by_prefix(prompt, generation, reply, new)
        if self._user_delta is None or not self._shows(generation, reply, new):
            return None
        tools, _ = self._escape(prompt.tools)
        text = self._turn(generation, reply, new, tools)
        return text if text is not None and all(_occurs(message, text) for message in new) else None

    def _shows(self, generation: Generation, reply: Message, new: list[Message]) -> bool:
        """Whether the template shows what messages of these roles say, and alike after one and two turns.

        A yes holds for this sequence of roles from then on. (A short text would occur by chance.)
        """
        shape = (bool(reply.get("tool_calls")), tuple(message["role"] for message in new))
        if shape in self._shown:
            return True
        probes = [{**message, "content": f"{PROBE}{i}{PROBE}"} for i, message in enumerate(new)]
        one = self._turn(generation, reply, probes, [])
        two = self._turn(generation, reply, probes, [], before=EARLIER)
        if one is None or one != two or not all(probe["content"] in one for probe in probes):
            return False
        self._shown.add(shape)
        return True

    def _turn(
        self,
        generation: Generation,
        reply: Message,
        new: list[Message],
        tools: list[Any],
        before: Sequence[Message] = (),
    ) -> str | None:
        try:
            return self._after_marker([*before, SAID, *new], tools)
        except RefusedError:
            return self._after_call(generation, reply, new, tools, before)

    def _after_marker(self, turn: list[Message], tools: Sequence[dict[str, Any]], *, reply: bool = True) -> str | None:
        text = self.template.render([{"role": "user", "content": "x"}, *turn], tools, reply=reply)
        return text.partition(MARKER)[2] if text.count(MARKER) == 1 else None

    def _after_call(
        self, generation: Generation, reply: Message, new: list[Message], tools: list[Any], before: Sequence[Message]
    ) -> str | None:
        """For templates that take a tool message only after its call: the marker is in the last argument. What closes the
        call was sampled, so the delta starts where the text has the special token that ended the sample, else any.
        """
        if not reply.get("tool_calls"):
            return None
        try:
            text = self._after_marker([*before, with_marked_call(reply), *new], tools)
        except RefusedError:
            return None
        if text is None:
            return None
        ending = self._ending(generation)
        start = text.find(ending) if ending and ending in text else self.special.first_in(text)
        return None if start is None else text[start:]

    def _ending(self, generation: Generation) -> str:
        """The text of the special token or stop id at the sample's end; '' when it ends with neither."""
        last = tuple(generation.token_ids[-1:])
        return self.text(last, special=True) if self._ends_turns(last) else ""

    def _ends_turns(self, ids: Sequence[int]) -> bool:
        return any(i in self.special.ids or i in self.stop_ids for i in ids)

    def _delta_by_prefix(
        self, prompt: Prompt, generation: Generation, reply: Message, new: list[Message]
    ) -> str | None:
        """What follows prompt and sample in a whole rendering, if the template left both as they were."""
        safe, _ = self._escape([*prompt.messages, reply])
        tools, _ = self._escape(prompt.tools)
        try:
            whole = self.template.render([*safe, *new], tools)
        except RefusedError:
            return None
        so_far = self._said_so_far(prompt, generation)
        return whole[len(so_far) :] if whole.startswith(so_far) else None

    def _said_so_far(self, prompt: Prompt, generation: Generation) -> str:
        """The text of prompt and sample, without the token that ended the sample: the template prints its own."""
        ending = self._ending(generation)
        return prompt.text + self.text(generation.token_ids, special=True).removesuffix(ending)

    def _same_delta_after_one_and_two_turns(self) -> str | None:
        """The delta of a user message, None where it depends on what came before."""
        new = {"role": "user", "content": "y"}
        try:
            one = self._after_marker([SAID, new], ())
            two = self._after_marker([*EARLIER, SAID, new], ())
        except RefusedError:
            return None
        return one if one == two else None

    def _own_stop_ids(self) -> set[int]:
        """End of sequence, and the special token that the template prints after the last assistant turn; where it prints
        none there, the one that begins what follows a turn.
        """
        eos = self.tokenizer.eos_token_id
        stops = {int(eos)} if eos is not None else set()
        if self._user_delta is None:
            return stops
        try:
            closing = self._after_marker([SAID], (), reply=False)
        except RefusedError:
            closing = None
        first = self.special.encode((closing or "").strip() or self._user_delta)[:1]
        return stops | self.special.ids.intersection(first)

    # ------------------------------------------------------------------ ids and images

    def _escape(self, said: Sequence[Any]) -> tuple[list[Any], int]:
        return (list(said), 0) if self.template.literal else self.special.escape(said)

    def _delta_ids(self, sampled: tuple[int, ...], delta: str) -> tuple[int, ...]:
        """Ids of the delta, without the token that ends the turn where the sample ended with it."""
        ids = self.template.later_ids(delta) if self.template.literal else self.special.encode(delta)
        return ids[1:] if ids[:1] == sampled[-1:] and self._ends_turns(ids[:1]) else ids

    def _with_images(
        self, base: Prompt, ids: tuple[int, ...], images: list[Image], sampled: tuple[int, ...] = ()
    ) -> Prompt:
        """`base` continued by what was sampled and by `ids`, in which each image's single placeholder gives way to its
        expansion.
        """
        expanded, slots = self.expander.expand(ids, images)
        offset = len(base.token_ids) + len(sampled)
        moved = tuple((sha, offset + start, count) for sha, start, count in slots)
        prompt = replace(
            base,
            token_ids=(*base.token_ids, *sampled, *expanded),
            images=base.images + tuple(images),
            slots=base.slots + moved,
        )
        if self.seen is not None:
            self.seen(prompt)
        return prompt


def with_marked_call(reply: Message) -> Message:
    """The assistant's turn with the marker for the last argument of its last call."""
    *first, last = reply["tool_calls"]
    function = last.get("function", last)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json_bounds.loads(arguments)
        except ValueError:
            arguments = {}
    given = arguments if isinstance(arguments, dict) and arguments else {"x": ""}
    marked = {**function, "arguments": {**given, list(given)[-1]: MARKER}}
    return {**reply, "tool_calls": [*first, {**last, "function": marked} if "function" in last else marked]}


def _occurs(message: Message, text: str) -> bool:
    """Whether the template shows what the message says, as it is or as a JSON string."""
    content = message.get("content") or ""
    said = [part.strip() for part in ([content] if isinstance(content, str) else content) if isinstance(part, str)]
    return all(
        any(form in text for form in (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]))
        for part in said
    )
