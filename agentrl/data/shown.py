"""What a row shows to a model: prompt, pictures, tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DataSection
from ..errors import DataError
from ..messages import Image, Message, Text, as_message
from .pictures import Album

PLACE = "<image>"
"""Where a picture of the image column stands in a text."""
SPEAKERS = ("system", "user", "assistant", "tool")
ROLES = {"human": "user", "gpt": "assistant", "function": "tool"} | {r: r for r in SPEAKERS}
"""The roles of messages with the keys `from` and `value` (ShareGPT)."""
TEXTS, PICTURES = ("text", "input_text"), ("image", "image_url", "input_image")


@dataclass(frozen=True)
class Shown:
    """`prompt` is a string (its pictures, if any, are shown before it) or chat messages with their pictures in them;
    `images` are all the pictures in order, `tools` OpenAI function schemas.
    """

    prompt: str | list[Message]
    images: tuple[Image, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def read_row(row: Mapping[str, Any], section: DataSection, folder: Path = Path("."), *, unseen: bool = False) -> Shown:
    """Prompt, pictures and tools of a row, by the section's keys. Raises DataError without the row's number.

    Pictures are decoded when they are first looked at; with `unseen` they are blank ones.
    """
    prompt, album = cell(row, section.input_key), Album(folder, section, unseen)
    images: tuple[Image, ...] = ()
    if section.image_key is not None:
        images = album.all(cell(row, section.image_key))
    tools = () if section.tools_key is None else _tools(cell(row, section.tools_key))
    if isinstance(prompt, str) and (prompt or section.empty_texts):
        if section.template is not None:
            prompt = section.template.replace("{}", prompt)
        return Shown(_with_places(prompt, images) if images and PLACE in prompt else prompt, images, tools)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{section.input_key!r} is {repr(prompt)[:60]}, not a prompt")
    if section.template is not None:
        raise DataError("--data.template is for prompts that are strings, and this is a list of messages")
    return _conversation(prompt, images, tools, album)


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Raises DataError with the columns there are."""
    if column not in row:
        raise DataError(f"there is no {column!r} in it; it has {', '.join(row) or 'nothing'}")
    return row[column]


def _with_places(prompt: str, images: tuple[Image, ...]) -> list[Message]:
    places = prompt.count(PLACE)
    if places != len(images):
        raise DataError(f"the prompt has {places} places {PLACE} for {len(images)} images")
    return [{"role": "user", "content": _cut(prompt, iter(images))}]


def _cut(text: str, images: Iterator[Any]) -> list[Any]:
    """The text with one of the images at each of its places."""
    first, *others = text.split(PLACE)
    parts: list[Any] = [Text(first)]
    for other in others:
        parts += [next(images), Text(other)]
    return [part for part in parts if part != ""]


def _conversation(
    prompt: list[Any], images: tuple[Image, ...], tools: tuple[dict[str, Any], ...], album: Album
) -> Shown:
    """Messages with every picture in its place: a part without one takes the next of the image column, and where all
    contents are texts so does each <image> in what the assistant did not say; where nothing asks, they stand before the
    first user's text.
    """
    rest, shown = iter(images), list[Image]()
    if images and not any(isinstance(m.get("content"), list | tuple) for m in prompt if isinstance(m, Mapping)):
        prompt = [_with_parts(message) for message in prompt]
    messages = [_message(message, rest, shown, album) for message in prompt]
    left = tuple(rest)
    if left and len(left) < len(images):
        raise DataError(f"the messages have places for {len(images) - len(left)} of {len(images)} images")
    if left:
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        content = first["content"] or ""
        first["content"] = [*left, *([Text(content)] if isinstance(content, str) else content)]
        shown = [*left, *shown]
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"] in (None, []):
            raise DataError(f"message {i}, of the {message['role']}, has no content")
    return Shown(messages, tuple(shown), tools)


def _with_parts(message: Any) -> Any:
    """A message whose text has places for pictures as one of parts."""
    key = "content" if isinstance(message, Mapping) and message.get("content") is not None else "value"
    text = message.get(key) if isinstance(message, Mapping) and role_of(message) != "assistant" else None
    if not isinstance(text, str) or PLACE not in text:
        return message
    return {**message, key: _cut(text, itertools.repeat({"type": "image"}))}


def _message(message: Any, rest: Iterator[Image], shown: list[Image], album: Album) -> Message:
    """Columnar files fill what a message lacks with nulls: those are left out."""
    if not isinstance(message, Mapping):
        raise DataError(f"a chat message is an object with a role, not {repr(message)[:60]}")
    said = {"content": None, **{key: value for key, value in message.items() if value is not None}}
    if "role" not in said and "from" in said:
        said["role"], said["content"] = role_of(said), said.pop("value", None)
        del said["from"]
    content = said["content"]
    if isinstance(content, list | tuple):
        parts = [_part(part, rest, album) for part in content]
        shown += [part for part in parts if isinstance(part, Image)]
        said["content"] = parts
    if isinstance(said.get("tool_calls"), list):
        said["tool_calls"] = _without_nulls(said["tool_calls"])
    read = as_message(said)
    if read["role"] == "developer":
        read["role"] = "system"
    if read["role"] not in SPEAKERS:
        raise DataError(f"the role of a message is {read['role']!r}, which is none of {', '.join(SPEAKERS)}")
    return read


def role_of(message: Any) -> str | None:
    """The role of a message as a row has it; None where it says none. Raises DataError for an unknown `from`."""
    if not isinstance(message, Mapping):
        return None
    if message.get("role") is not None or message.get("from") is None:
        return message.get("role")
    role = ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise DataError(f"a message is from {message['from']!r}, which is none of {', '.join(ROLES)}")
    return role


def _part(part: Any, rest: Iterator[Image], album: Album) -> Any:
    if isinstance(part, str):
        return Text(part)
    if not isinstance(part, Mapping):
        return album.one(part)
    given = {key: value for key, value in part.items() if value is not None}
    kind = given.pop("type", None)
    if kind in TEXTS and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind not in PICTURES:
        raise DataError(f"a content part is a text or an image, not {repr(part)[:80]}")
    given.pop("text", None)
    if "image_url" in given:
        given["url"] = given.pop("image_url")
    if given:
        return album.one(given)
    image = next(rest, None)
    if image is None:
        raise DataError("the messages have places for more images than --data.image-key gives")
    return image


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Function schemas, as a list or as the JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"the tools are no JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"tools are a list of OpenAI function schemas, not {repr(value)[:60]}")
    return tuple(_without_nulls(value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value
