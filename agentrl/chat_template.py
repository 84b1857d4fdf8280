"""The chat template of a tokenizer or processor: messages to text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from . import json_bounds
from .errors import ConfigError
from .messages import Image, Message, message_text
from .special_text import encodable

PROBE_CALL = {"id": "probe0000", "type": "function", "function": {"name": "probe_name", "arguments": {"a": 1}}}


class RefusedError(Exception):
    """The template will not render these messages."""


def tokenizer_of(tokenizer_or_processor: Any) -> Any:
    """The tokenizer itself, or the one inside a processor."""
    if hasattr(tokenizer_or_processor, "tokenizer"):
        return tokenizer_or_processor.tokenizer
    return tokenizer_or_processor


class ChatTemplate:
    """Renders messages to text. `literal` = there is no template and contents are joined as they are.

    What a template wants is found out once, by small renderings: contents as lists of parts, the arguments of a call as
    JSON text, None as the content of an assistant that only calls.
    """

    def __init__(self, tokenizer_or_processor: Any, choice: str = "auto") -> None:
        self.tokenizer = tokenizer_of(tokenizer_or_processor)
        self.literal = choice == "none"
        self._image_text = _image_token(tokenizer_or_processor)
        self._lists = self._text_arguments = False
        self._nothing_said: str | None = ""
        if not self.literal:
            self._source, self._tool_source = _template_sources(tokenizer_or_processor, choice)
            self._lists = self._wants_lists()
            self._learn_calls()

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, reply: bool = True) -> str:
        """The text, with the assistant's header at its end if a `reply` follows. Raises RefusedError."""
        if self.literal:
            return "".join(self._joined(message) for message in messages)
        shown = [self._as_template_input(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) or None,
                chat_template=self._tool_source if tools else self._source,
                add_generation_prompt=reply,
                tokenize=False,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"--model.chat-template: this is no jinja template: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise RefusedError(f"the chat template refuses these messages: {error}") from error

    # ------------------------------------------------------------------ without a template

    def first_ids(self, text: str) -> tuple[int, ...]:
        """Ids of the first piece without a template: after the tokenizer's own leading special tokens, once."""
        ids = self.later_ids(text)
        return ids if ids[: len(self._leading)] == self._leading else self._leading + ids

    def later_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a later piece without a template."""
        return tuple(self.tokenizer(encodable(text), add_special_tokens=False).input_ids)

    @cached_property
    def _leading(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text."""
        bare = self.later_ids("x")
        ids = tuple(self.tokenizer("x").input_ids)
        starts = (i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
        return ids[: next(starts, 0)]

    def _joined(self, message: Message) -> str:
        content = message["content"]
        if not isinstance(content, list):
            return content or ""
        return "".join(self._image_text if isinstance(part, Image) else part for part in content)

    # ------------------------------------------------------------------ what the template is given

    def _as_template_input(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [self._call(call) for call in calls]}
        return {**message, "content": self._content(message.get("content"), calls=bool(calls))}

    def _content(self, content: Any, *, calls: bool) -> Any:
        if not content:
            content = self._nothing_said if calls else ""
        with_images = isinstance(content, list) and any(isinstance(part, Image) for part in content)
        if with_images or (self._lists and content is not None):
            return [_as_dict(part) for part in (content if isinstance(content, list) else [content])]
        return message_text({"content": content}) if isinstance(content, list) else content

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with its arguments in the form this template wants; text that is no JSON object stays text."""
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._text_arguments:
            arguments = _object(arguments)
        elif not isinstance(arguments, str) and self._text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        changed = {**function, "arguments": arguments}
        return {**call, "function": changed} if "function" in call else changed

    def _wants_lists(self) -> bool:
        """Some image models' templates read content as a list of parts only and print nothing for a str."""
        probe: list[Message] = [{"role": "user", "content": "probe"}]
        if self._shows("probe", probe):
            return False
        self._lists = True
        return self._shows("probe", probe)

    def _learn_calls(self) -> None:
        turn: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
        ]
        for nothing_said, text_arguments in itertools.product(("", None), (False, True)):
            self._nothing_said, self._text_arguments = nothing_said, text_arguments
            if self._shows("probe_name", turn):
                return
        self._nothing_said, self._text_arguments = "", False

    def _shows(self, text: str, messages: list[Message]) -> bool:
        try:
            return text in self.render(messages, ())
        except RefusedError:
            return False


def _as_dict(part: Any) -> dict[str, Any]:
    return {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": str(part)}


def _object(text: str) -> Any:
    try:
        value = json_bounds.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _image_token(tokenizer_or_processor: Any) -> str:
    return tokenizer_or_processor.image_token if hasattr(tokenizer_or_processor, "image_token") else ""


def _template_sources(tokenizer_or_processor: Any, choice: str) -> tuple[str, str]:
    """(the jinja template, the one for conversations with tools): two only where the tokenizer brings two."""
    if choice != "auto":
        path = Path(choice)
        if not path.is_file():
            raise ConfigError(
                f"--model.chat-template {choice}: there is no such file. Give auto, none or the path of a jinja file."
            )
        return (source := path.read_text(encoding="utf-8")), source
    for holder in (tokenizer_or_processor, tokenizer_of(tokenizer_or_processor)):
        found = holder.chat_template if hasattr(holder, "chat_template") else None
        named: dict[str, Any] = found if isinstance(found, dict) else {"default": found}
        if named.get("default"):
            return named["default"], named.get("tool_use") or named["default"]
    raise ConfigError(
        "This model's tokenizer has no chat template. Pass --model.chat-template PATH with a jinja file, "
        "or --model.chat-template none to join message contents as they are."
    )
