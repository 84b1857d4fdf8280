"""Chat messages to token ids, extended turn by turn and never rendered again.

`start` renders a conversation once. `extend` appends what the engine sampled, id for id, and the *delta*: the text that
the chat template puts between an assistant turn and the next generation. The delta is read off a short rendering in which
a marker stands for the assistant's content, so its cost does not grow with the episode.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .chat_template import ChatTemplate, RefusedError
from .engine import Generation
from .image_expansion import ImageExpander
from .messages import Image, Message, as_message, message_images, message_text
from .special_text import SpecialText
from .trajectory import ImageSlot

MARKER = "\ue010assistant\ue011"


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
        self._expander = ImageExpander(tokenizer_or_processor)
        self._special = SpecialText(self.tokenizer)
        self._stable = self.template.literal or self._same_delta_after_one_and_two_turns()
        self.stop_ids = tuple(sorted({*stop_ids, *self._own_stop_ids()}))

    # ------------------------------------------------------------------ the public three

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Prompt:
        """The first prompt of a conversation, ready for the assistant."""
        messages = [as_message(message) for message in messages]
        safe, escaped = self._special.escape(messages) if not self.template.literal else (messages, 0)
        text = self.template.render(safe, tools)
        ids = self.template.first_ids(text) if self.template.literal else self._encode(text)
        base = Prompt((), messages=tuple(messages), tools=tuple(tools), text=text, escaped=escaped)
        return self._with_images(base, ids, message_images(messages))

    def extend(self, prompt: Prompt, generation: Generation, messages: Sequence[Message]) -> Prompt:
        """prompt + the sampled ids + the delta of `messages`.

        `messages` may begin with the assistant message that the sample was parsed into (with its `tool_calls`); the rest
        is what the environment said. All of it is one delta.
        """
        reply, new = self._split(generation, [as_message(message) for message in messages])
        history = (*prompt.messages, reply, *new)
        safe, escaped = self._special.escape(new) if not self.template.literal else (new, 0)
        delta = self._delta(prompt, generation, reply, safe)
        if delta is None:
            branch = self.start(history, prompt.tools)
            return replace(branch, branched=True)
        ids = self._encode(delta) if not self.template.literal else self.template.later_ids(delta)
        sampled = tuple(generation.token_ids)
        if sampled and ids and sampled[-1] == ids[0] and ids[0] in self.stop_ids:
            ids = ids[1:]
        base = replace(
            prompt,
            token_ids=prompt.token_ids + sampled,
            messages=history,
            text=prompt.text + self.tokenizer.decode(sampled) + delta,
            kept=len(prompt.token_ids) + len(sampled),
            branched=False,
            escaped=escaped,
        )
        return self._with_images(base, ids, message_images(new))

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of sampled ids; special tokens (and a stop id's text) are left out unless asked for."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def strip_special(self, text: str) -> str:
        """`text` without special-token strings."""
        return self._special.strip(text)

    def count_images(self, images: Sequence[Image]) -> int:
        """How many tokens these images take once expanded."""
        return sum(len(self._expander.expansion(image)) for image in images)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids that stand for image features: never to be sampled by a model."""
        return self._expander.placeholder_ids

    # ------------------------------------------------------------------ the delta

    def _split(self, generation: Generation, messages: list[Message]) -> tuple[Message, list[Message]]:
        if messages and messages[0]["role"] == "assistant":
            return messages[0], messages[1:]
        return {"role": "assistant", "content": self.text(generation.token_ids)}, messages

    def _delta(self, prompt: Prompt, generation: Generation, reply: Message, new: list[Message]) -> str | None:
        """The text after the assistant's turn up to the next generation; None = the template demands a branch."""
        if self.template.literal:
            return self.template.render(new, ())
        if not self._stable:
            return None
        if self.history == "branch":
            return self._delta_by_prefix(prompt, generation, reply, new)
        try:
            text = self._after_marker([_marked(reply, calls=False), *new], prompt.tools)
        except RefusedError:
            text = self._after_call(reply, new, prompt.tools)
        return text if text is not None and all(_occurs(message, text) for message in new) else None

    def _after_marker(self, turn: list[Message], tools: Sequence[dict[str, Any]]) -> str | None:
        text = self.template.render([{"role": "user", "content": "x"}, *turn], tools)
        return text.partition(MARKER)[2] if text.count(MARKER) == 1 else None

    def _after_call(self, reply: Message, new: list[Message], tools: Sequence[dict[str, Any]]) -> str | None:
        """For templates that take a tool message only after its call: the marker is in the last argument, and what closes
        the call is part of what was sampled, so the delta starts at the first end-of-turn token after it.
        """
        if not reply.get("tool_calls"):
            return None
        try:
            text = self._after_marker([_marked(reply, calls=True), *new], tools)
        except RefusedError:
            return None
        start = self._special.first_in(text) if text is not None else None
        return None if text is None or start is None else text[start:]

    def _delta_by_prefix(
        self, prompt: Prompt, generation: Generation, reply: Message, new: list[Message]
    ) -> str | None:
        """What follows prompt and sample in a whole rendering, if the template left both as they were."""
        safe, _ = self._special.escape([*prompt.messages, reply])
        whole = self.template.render([*safe, *new], prompt.tools)
        so_far = prompt.text + self.text(generation.token_ids)
        if not whole.startswith(so_far):
            return None
        return whole[len(so_far) :]

    def _same_delta_after_one_and_two_turns(self) -> bool:
        marked = {"role": "assistant", "content": MARKER}
        before = [{"role": "user", "content": "w"}, {"role": "assistant", "content": "z"}]
        new = {"role": "user", "content": "y"}
        try:
            one = self._after_marker([marked, new], ())
            two = self._after_marker([*before[1:], before[0], marked, new], ())
        except RefusedError:
            return False
        return one is not None and one == two

    def _own_stop_ids(self) -> set[int]:
        eos = self.tokenizer.eos_token_id
        stops = {eos} if eos is not None else set()
        if not self.template.literal and self._stable:
            delta = self._after_marker([{"role": "assistant", "content": MARKER}, {"role": "user", "content": "y"}], ())
            first = self._encode(delta or "")[:1]
            stops.update(i for i in first if i in self._special.ids)
        return stops

    # ------------------------------------------------------------------ ids and images

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._special.encode(text)

    def _with_images(self, base: Prompt, ids: tuple[int, ...], images: list[Image]) -> Prompt:
        """`base` continued by `ids`, each image's single placeholder replaced by its expansion."""
        if not images:
            return replace(base, token_ids=base.token_ids + ids)
        expanded, slots = self._expander.expand(ids, images)
        offset = len(base.token_ids)
        moved = tuple((sha, offset + start, count) for sha, start, count in slots)
        return replace(
            base,
            token_ids=base.token_ids + expanded,
            images=base.images + tuple(images),
            slots=base.slots + moved,
        )


def _marked(reply: Message, *, calls: bool) -> Message:
    """The assistant's turn with the marker for its content, or for the last argument of its last call."""
    if not calls:
        return {"role": "assistant", "content": MARKER}
    *first, last = reply["tool_calls"]
    function = last["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    keys = list(arguments) if isinstance(arguments, dict) and arguments else ["x"]
    marked = {**(arguments if isinstance(arguments, dict) else {}), keys[-1]: MARKER}
    return {**reply, "tool_calls": [*first, {**last, "function": {**function, "arguments": marked}}]}


def _occurs(message: Message, text: str) -> bool:
    """Whether the template shows what the message says, as it is or as a JSON string."""
    said = message_text(message).strip()
    return any(form in text for form in (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1]))
