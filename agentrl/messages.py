"""What is said: content parts, chat messages, tool calls and the model's action.

A message is an OpenAI-style dict `{"role", "content", "tool_calls"?, "tool_call_id"?}` whose content is a str, None, or a list
of parts. Parts are `Text` and `Image` objects here; `normalize` also takes plain strings, PIL pictures and OpenAI part dicts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as PILImage
from PIL import ImageOps

from .errors import DataError

Message = dict[str, Any]
MOST_PIXELS = 2**26
"""Of a picture that is decoded: 200 MB of RGB. Half a megabyte of PNG can hold more."""


class Text(str):
    """A text part. It is a str, so anything that takes text takes it."""

    @property
    def text(self) -> str:
        return str(self)


class Image:
    """A picture: a snapshot of a PIL image, or a path, encoded bytes or a `data:` URL that is decoded when first looked at.

    One normalisation for engine and trainer: EXIF orientation applied, transparency on white, 8 bits, RGB, no metadata. `png` are
    the bytes that travel and are stored, `sha256` is their hash; both are the same on every machine for equal pixels and
    one Pillow, and pickling keeps them. Raises DataError when the source is no picture, or one of more than MOST_PIXELS.
    """

    __slots__ = ("_pil", "_png", "_sha256", "_source")

    def __init__(self, source: PILImage.Image | str | os.PathLike[str] | bytes | Image) -> None:
        self._source: Any = None
        self._pil: PILImage.Image | None = None
        self._png: bytes | None = None
        self._sha256: str | None = None
        if isinstance(source, Image):
            self._source, self._pil, self._png, self._sha256 = source._source, source._pil, source._png, source._sha256
        elif isinstance(source, PILImage.Image):
            self._pil = _rgb(source)
        elif isinstance(source, str | os.PathLike | bytes):
            self._source = source
        else:
            raise DataError(f"an image must be a PIL image, path, bytes or data URL, not {type(source).__name__}")

    @classmethod
    def from_png(cls, png: bytes) -> Image:
        """From what `png` gave elsewhere: these bytes and their hash are kept, whichever Pillow wrote them."""
        image = cls(png)
        image._png = png
        return image

    @property
    def pil(self) -> PILImage.Image:
        if self._pil is None:
            self._pil = _decode(self._source)
            self._source = None
        return self._pil

    @property
    def png(self) -> bytes:
        if self._png is None:
            buffer = io.BytesIO()
            self.pil.save(buffer, format="PNG", compress_level=1)
            self._png = buffer.getvalue()
        return self._png

    @property
    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.png).hexdigest()
        return self._sha256

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.pil.size

    def __reduce__(self) -> tuple[Any, ...]:
        return (Image.from_png, (self.png,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        if self._pil is None:
            return f"Image({_shown(self._source)})"
        return f"Image({self.size[0]}x{self.size[1]}, {self.sha256[:12]})"


def _decode(source: Any) -> PILImage.Image:
    try:
        if isinstance(source, str) and source.startswith("data:"):
            header, _, payload = source.partition(",")
            if not header.endswith(";base64"):
                raise DataError("an image data URL must be base64")
            source = base64.b64decode(payload, validate=True)
        if isinstance(source, bytes):
            return _rgb(_bounded(PILImage.open(io.BytesIO(source))))
        with PILImage.open(Path(source)) as picture:
            return _rgb(_bounded(picture))
    except DataError:
        raise
    except Exception as error:  # decoders of broken files raise nearly anything
        raise DataError(f"cannot read an image from {_shown(source)}: {error}") from error


def _bounded(picture: PILImage.Image) -> PILImage.Image:
    """The picture, of which only the header was read so far. Raises DataError for one that is too large to decode."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise DataError(f"an image of {width}x{height} pixels is larger than the {MOST_PIXELS} that are decoded")
    return picture


def _rgb(picture: PILImage.Image) -> PILImage.Image:
    """A copy with the pixels alone. Raises DataError for pixels that cannot be decoded or have no RGB form."""
    try:
        picture = _eight_bits(ImageOps.exif_transpose(picture) or picture)
        if picture.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = PILImage.new("RGBA", picture.size, (255, 255, 255, 255))
            picture = PILImage.alpha_composite(white, picture)
        pixels = picture.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # as in `_decode`
        raise DataError(f"cannot decode an image: {error}") from error
    pixels.info = {}
    return pixels


def _eight_bits(picture: PILImage.Image) -> PILImage.Image:
    """Greys of 16 bits scaled to 8. Those of 32 bits and of floats say nowhere what white is: they are taken as 0 to 255,
    rounded, and others are a DataError, as cutting them off would lose the picture.
    """
    if picture.mode not in ("I", "F") and not picture.mode.startswith("I;16"):
        return picture
    scale = 255 / 65535 if picture.mode.startswith("I;16") else 1.0
    extrema: Any = picture.getextrema()
    low, high = extrema
    if not 0 <= low * scale <= high * scale <= 255:
        raise DataError(f"greys from {low:g} to {high:g}: bring them to 0 to 255, as in mode L")
    grey = picture.convert("F").point(lambda value: value * scale + 0.5).convert("L")
    see_through = picture.info.get("transparency")
    grey.info = {} if see_through is None else {"transparency": round(see_through * scale)}
    return grey


def _shown(source: Any) -> str:
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    return repr(source)[:80] if isinstance(source, str) else os.fspath(source)[:400]


Part = Text | Image
Observation = str | Sequence[Any]


@dataclass(frozen=True)
class ToolCall:
    """One call the model wrote. `arguments` is None when `raw` is not a JSON object; `id` is unique in the episode."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str


class Action(str):
    """What the model wrote in one turn: a str with special tokens stripped, '' for an empty reply.

    `token_ids` are the sampled ids, `finish_reason` is stop | length | placeholder.
    """

    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    finish_reason: str

    def __new__(
        cls,
        text: str = "",
        *,
        tool_calls: Iterable[ToolCall] = (),
        token_ids: Iterable[int] = (),
        finish_reason: str = "stop",
    ) -> Action:
        action = super().__new__(cls, text)
        action.tool_calls = tuple(tool_calls)
        action.token_ids = tuple(token_ids)
        action.finish_reason = finish_reason
        return action


def as_part(value: Any) -> Part:
    """One content part from a str, picture, `Text`, `Image` or an OpenAI part dict."""
    if isinstance(value, Image):
        return value
    if isinstance(value, str):
        return value if isinstance(value, Text) else Text(value)
    if isinstance(value, PILImage.Image | bytes | os.PathLike):
        return Image(value)
    if isinstance(value, dict):
        kind = value.get("type")
        if kind in ("text", "input_text") and isinstance(value.get("text"), str):
            return Text(value["text"])
        if kind == "image" and "image" in value:
            return Image(value["image"])
        if kind == "image_url":
            url: Any = value.get("image_url")
            return Image(url["url"] if isinstance(url, dict) else url)
    raise DataError(f"not a content part: {repr(value)[:100]}")


def as_message(message: Message) -> Message:
    """The same message with its content a str, None, or a list of `Text` / `Image` parts. Raises DataError for a message
    without a role, or with `tool_calls` that are none.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"a chat message needs a role: {repr(message)[:100]}")
    _check_calls(message.get("tool_calls"))
    content = message.get("content")
    if content is None or (isinstance(content, str) and not isinstance(content, Text)):
        return {**message, "content": content}
    if isinstance(content, list | tuple):
        return {**message, "content": [as_part(part) for part in content]}
    return {**message, "content": [as_part(content)]}


def _check_calls(calls: Any) -> None:
    """Each is {"function": {"name", "arguments"}}, or the function alone; arguments are an object, its JSON, or nothing."""
    if not isinstance(calls, list | tuple | None):
        raise DataError(f"tool_calls are a list, not {repr(calls)[:60]}")
    for call in calls or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"a tool call has a function with a name and arguments, unlike {repr(call)[:80]}")
        if not isinstance(function.get("arguments"), Mapping | str | None):
            raise DataError(f"the arguments of a tool call are an object or its JSON, unlike {repr(call)[:80]}")


def normalize(observation: Observation, role: str = "user") -> list[Message]:
    """Chat messages of an observation: a str or list of parts is one message of `role`, a list of messages is itself."""
    if isinstance(observation, str):
        return [{"role": role, "content": str(observation)}]
    if not isinstance(observation, list | tuple):
        raise DataError(
            f"an observation is a str, a list of parts or a list of messages, not {type(observation).__name__}"
        )
    if observation and all(isinstance(item, dict) and "role" in item for item in observation):
        return [as_message(item) for item in observation]
    return [as_message({"role": role, "content": list(observation)})]


def message_images(messages: Iterable[Message]) -> list[Image]:
    """Every image of the messages in reading order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Image)
    ]


def message_text(message: Message) -> str:
    """The text of one message, parts joined, images left out."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part for part in content if isinstance(part, str))
    return content or ""


def message_record(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with each picture replaced by its hash."""
    content = message.get("content")
    if isinstance(content, list):
        content = [_part_record(part) for part in content]
    return {**message, "content": content}


def _part_record(part: Any) -> Any:
    """A part that came from a record is one already."""
    if isinstance(part, dict):
        return part
    return {"type": "image", "sha256": part.sha256} if isinstance(part, Image) else {"type": "text", "text": str(part)}
