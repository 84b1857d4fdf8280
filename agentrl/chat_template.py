"""The chat template of a tokenizer or processor: messages to text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from .errors import ConfigError
from .messages import Image, Message, message_text


class RefusedError(Exception):
    """The template will not render these messages."""


def tokenizer_of(tokenizer_or_processor: Any) -> Any:
    """The tokenizer itself, or the one inside a processor."""
    if hasattr(tokenizer_or_processor, "tokenizer"):
        return tokenizer_or_processor.tokenizer
    return tokenizer_or_processor


class ChatTemplate:
    """Renders messages to text. `literal` = there is no template and contents are joined as they are."""

    def __init__(self, tokenizer_or_processor: Any, choice: str = "auto") -> None:
        self.tokenizer = tokenizer_of(tokenizer_or_processor)
        self.literal = choice == "none"
        self._image_text = _image_token(tokenizer_or_processor)
        self._source = "" if self.literal else _template_source(tokenizer_or_processor, choice)
        self._lists = not self.literal and self._wants_lists()

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """The text with the assistant's header at its end. Raises RefusedError."""
        if self.literal:
            return "".join(self._joined(message) for message in messages)
        shown = [self._as_template_input(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) or None,
                chat_template=self._source,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise RefusedError(f"the chat template refuses these messages: {error}") from error

    def first_ids(self, text: str) -> tuple[int, ...]:
        """Ids of the first piece without a template: with the tokenizer's own special tokens, but no end of sequence."""
        ids = list(self.tokenizer(text).input_ids)
        eos = self.tokenizer.eos_token
        if ids and eos and ids[-1] == self.tokenizer.eos_token_id and not text.endswith(eos):
            ids.pop()
        return tuple(ids)

    def later_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a later piece without a template."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _joined(self, message: Message) -> str:
        content = message["content"]
        if not isinstance(content, list):
            return content or ""
        return "".join(self._image_text if isinstance(part, Image) else part for part in content)

    def _as_template_input(self, message: Message) -> Message:
        content = message.get("content")
        with_images = isinstance(content, list) and any(isinstance(part, Image) for part in content)
        if with_images or (self._lists and content is not None):
            parts = content if isinstance(content, list) else [content]
            return {**message, "content": [_as_dict(part) for part in parts]}
        if isinstance(content, list):
            return {**message, "content": message_text(message)}
        return message

    def _wants_lists(self) -> bool:
        """Some image models' templates read content as a list of parts only and print nothing for a str."""
        probe: list[Message] = [{"role": "user", "content": "probe"}]
        try:
            return "probe" not in self.render_with(probe, lists=False) and "probe" in self.render_with(
                probe, lists=True
            )
        except RefusedError:
            return False

    def render_with(self, messages: Sequence[Message], *, lists: bool) -> str:
        """`render` with text contents given as lists of parts, or as strings."""
        self._lists = lists
        return self.render(messages, ())


def _as_dict(part: Any) -> dict[str, Any]:
    return {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": str(part)}


def _image_token(tokenizer_or_processor: Any) -> str:
    return tokenizer_or_processor.image_token if hasattr(tokenizer_or_processor, "image_token") else ""


def _template_source(tokenizer_or_processor: Any, choice: str) -> str:
    if choice != "auto":
        path = Path(choice)
        if not path.is_file():
            raise ConfigError(
                f"--model.chat-template {choice}: there is no such file. Give auto, none or the path of a jinja file."
            )
        return path.read_text()
    for holder in (tokenizer_or_processor, tokenizer_of(tokenizer_or_processor)):
        source = holder.chat_template if hasattr(holder, "chat_template") else None
        if isinstance(source, dict):
            source = source.get("default")
        if source:
            return source
    raise ConfigError(
        "This model's tokenizer has no chat template. Pass --model.chat-template PATH with a jinja file, "
        "or --model.chat-template none to join message contents as they are."
    )
