"""The values of the protocol as JSON, and back: what env server, reward server and their clients say to each other.

    Observation = string | [part] | {"messages": [message]}
    part        = {"type": "text", "text"} | {"type": "image", "sha256", "data"?: base64 of PNG bytes}
    Action      = string | {"text", "tool_calls": [{"id", "name", "arguments"}], "finish_reason"}
    Task        = {"id", "prompt", "label", "images", "row", "tools"?, "env"?}

In a label or row, what JSON has no word for is `{"type", "data"}`: "bytes" (base64), "datetime", "date", "time" (ISO 8601),
"timedelta" (microseconds), "decimal", "uuid", an image part, and "object" for an object that only looks like one of these.

Nothing that is decoded here opens a path or fetches a URL: an image is its bytes or the hash of one sent before.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import pydantic_core
from PIL import Image as PILImage

from .env import Task
from .errors import DataError, EnvError
from .messages import Action, Image, Message, Text, ToolCall, as_message, as_part
from .step_info import finite

JSON = Any
Images = MutableMapping[str, Image]
MICROSECOND = dt.timedelta(microseconds=1)
TAGS: dict[str, tuple[type, Callable[[Any], JSON], Callable[[Any], Any]]] = {
    "bytes": (
        bytes,
        lambda value: base64.b64encode(value).decode(),
        lambda data: base64.b64decode(data, validate=True),
    ),
    "datetime": (dt.datetime, dt.datetime.isoformat, dt.datetime.fromisoformat),
    "date": (dt.date, dt.date.isoformat, dt.date.fromisoformat),
    "time": (dt.time, dt.time.isoformat, dt.time.fromisoformat),
    "timedelta": (dt.timedelta, lambda value: value // MICROSECOND, lambda data: data * MICROSECOND),
    "decimal": (Decimal, str, Decimal),
    "uuid": (UUID, str, UUID),
}
"""Tag: (type, its data, and back). A datetime is a date too, and stands before it."""
OBJECT = "object"


def dump(value: Any, *, nan: bool = False) -> bytes:
    """JSON bytes. numpy scalars and arrays are numbers and lists, what JSON has no word for is its `str`, NaN and inf are
    null (with `nan`, the constants that Python reads back). Raises EnvError for what cannot be written.
    """
    mode: Any = "constants" if nan else "null"
    try:
        return pydantic_core.to_json(value, inf_nan_mode=mode, fallback=_fallback)
    except ValueError:
        pass
    try:
        return pydantic_core.to_json(_as_unicode(value), inf_nan_mode=mode, fallback=_fallback)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"what the environment returned cannot be written as JSON: {error}") from error


def _fallback(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _as_unicode(value: Any) -> Any:
    """Text and bytes with what is no Unicode replaced."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return {_as_unicode(key): _as_unicode(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_unicode(inner) for inner in value]
    return value


def verdict(value: Any) -> float | None:
    """A reward: a finite number, or None (no verdict) for null, NaN, inf and text. Raises EnvError for anything else."""
    return None if value is None or isinstance(value, str | bytes) else finite("the reward", value)


def image_form(image: Image, sent: Images) -> JSON:
    """An image part; its bytes only the first time. `sent` takes what was sent, without its pixels."""
    sha = image.sha256
    if sha in sent:
        return {"type": "image", "sha256": sha}
    sent[sha] = Image.from_png(image.png)
    return {"type": "image", "sha256": sha, "data": base64.b64encode(image.png).decode()}


def read_image(part: Mapping[str, Any], known: Images) -> Image:
    """The image of a part, which `known` then holds, without its pixels. Raises DataError: neither bytes nor known, or other
    bytes than said.
    """
    sha, data = part.get("sha256"), part.get("data")
    if data is None:
        if not isinstance(sha, str) or sha not in known:
            raise DataError(f"image {str(sha)[:64]} has no data and was not sent before")
        return Image(known[sha])
    try:
        png = base64.b64decode(data, validate=True)
    except (TypeError, ValueError) as error:
        raise DataError(f"an image's data must be base64: {error}") from None
    actual = hashlib.sha256(png).hexdigest()
    if sha is not None and sha != actual:
        raise DataError(f"the data of image {str(sha)[:64]} has the hash {actual}")
    known[actual] = Image.from_png(png)
    return Image(known[actual])


def _part_form(part: Any, sent: Images) -> JSON:
    part = as_part(part)
    return image_form(part, sent) if isinstance(part, Image) else {"type": "text", "text": str(part)}


def _read_part(part: Any, known: Images) -> Any:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Mapping) and part.get("type") == "image":
        return read_image(part, known)
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return Text(part["text"])
    raise DataError(f"a part is a text or an image with its data, not {repr(part)[:80]}")


def _message_form(message: Message, sent: Images) -> JSON:
    message = as_message(message)
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [_part_form(part, sent) for part in content]}
    return dict(message)


def _read_message(message: Any, known: Images) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"a message needs a role: {repr(message)[:80]}")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_read_part(part, known) for part in content]}
    if content is not None and not isinstance(content, str):
        raise DataError(f"a message's content is a text, null or a list of parts, not {repr(content)[:80]}")
    return dict(message)


def observation_form(observation: Any, sent: Images) -> JSON:
    """An env's observation; hashes and PNG bytes are made here. Raises DataError when it is none."""
    if isinstance(observation, str):
        return str(observation)
    if not isinstance(observation, list | tuple):
        raise DataError(
            f"an observation is a str, a list of parts or a list of messages, not {type(observation).__name__}"
        )
    if observation and all(isinstance(item, dict) and "role" in item for item in observation):
        return {"messages": [_message_form(item, sent) for item in observation]}
    return [_part_form(part, sent) for part in observation]


def read_observation(form: JSON, known: Images) -> Any:
    """Raises DataError."""
    if isinstance(form, str):
        return form
    if isinstance(form, list):
        return [_read_part(part, known) for part in form]
    if isinstance(form, Mapping) and isinstance(form.get("messages"), list):
        return [_read_message(message, known) for message in form["messages"]]
    raise DataError(f"an observation is a text, a list of parts or {{'messages': [...]}}, not {repr(form)[:80]}")


def unsent_images(form: JSON, known: Images) -> Iterator[str]:
    """Hashes of image parts that come without data and are not known yet."""
    if isinstance(form, list):
        for item in form:
            yield from unsent_images(item, known)
    elif isinstance(form, Mapping):
        sha = form.get("sha256")
        if form.get("type") == "image" and "data" not in form and isinstance(sha, str) and sha not in known:
            yield sha
        for key in ("messages", "content"):
            yield from unsent_images(form.get(key), known)


def action_form(action: Any) -> JSON:
    """`raw`, what the model wrote as a call's arguments, goes along where the arguments do not spell it."""
    if not isinstance(action, Action):
        return str(action)
    if not action.tool_calls and action.finish_reason == "stop":
        return str(action)
    calls = [_call_form(call) for call in action.tool_calls]
    return {"text": str(action), "tool_calls": calls, "finish_reason": action.finish_reason}


def _call_form(call: ToolCall) -> JSON:
    if call.arguments is None:
        return {"id": call.id, "name": call.name, "arguments": None, "raw": call.raw}
    form = {"id": call.id, "name": call.name, "arguments": call.arguments}
    return form if json.dumps(call.arguments) == call.raw else {**form, "raw": call.raw}


def read_action(form: JSON) -> Action:
    """From a text, or what `action_form` gives; arguments may also be a text, as OpenAI has them. Raises DataError."""
    if isinstance(form, str):
        return Action(form)
    if not isinstance(form, Mapping):
        raise DataError(f"an action is a text or an object, not {repr(form)[:80]}")
    calls, reason = form.get("tool_calls") or [], form.get("finish_reason", "stop")
    if not isinstance(form.get("text", ""), str) or not isinstance(calls, list) or not isinstance(reason, str):
        raise DataError("an action has text, tool_calls (a list) and finish_reason")
    return Action(form.get("text", ""), tool_calls=[_read_call(call) for call in calls], finish_reason=reason)


def _read_call(call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError(f"a tool call has id, name and arguments: {repr(call)[:80]}")
    arguments, raw = call.get("arguments"), call.get("raw")
    if isinstance(arguments, str):
        raw, arguments = arguments, _object(arguments)
    if not isinstance(arguments, dict):
        raw, arguments = raw if isinstance(raw, str) else json.dumps(arguments), None
    return ToolCall(
        str(call.get("id") or ""), call["name"], arguments, raw if isinstance(raw, str) else json.dumps(arguments)
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = pydantic_core.from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def task_form(task: Task) -> JSON:
    """A task with its images in it. Raises DataError for a label or row that JSON would not bring back as it is."""
    prompt: Any = task.prompt
    if isinstance(prompt, list | tuple):
        prompt = [_message_form(message, {}) for message in prompt]
    form = {
        "id": task.id,
        "prompt": prompt,
        "label": _plain(task.label, f"the label of task {task.id}"),
        "images": [image_form(Image(image), {}) for image in task.images],
        "row": _plain(dict(task.row), f"the row of task {task.id}"),
    }
    if task.env:
        form["env"] = task.env
    return {**form, "tools": _plain(task.tools, f"the tools of task {task.id}")} if task.tools else form


def read_task(form: JSON) -> Task:
    """Raises DataError."""
    if not isinstance(form, Mapping) or not isinstance(form.get("id"), str):
        raise DataError(f"a task has a text as id: {repr(form)[:80]}")
    prompt, images, row = form.get("prompt"), form.get("images") or [], form.get("row") or {}
    if isinstance(prompt, list):
        prompt = [_read_message(message, {}) for message in prompt]
    elif prompt is not None and not isinstance(prompt, str):
        raise DataError(f"task {form['id']}: a prompt is a text or a list of messages")
    tools, env = form.get("tools") or [], form.get("env") or ""
    if not isinstance(images, list) or not isinstance(row, Mapping) or not isinstance(env, str):
        raise DataError(f"task {form['id']}: images is a list, row an object and env a text")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"task {form['id']}: tools is a list of objects")
    shown = tuple(read_image(_object_form(part), {}) for part in images)
    return Task(form["id"], prompt, read_plain(form.get("label")), shown, read_plain(row), env, tuple(tools))


def _object_form(part: Any) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise DataError(f"an image is an object with its data, not {repr(part)[:80]}")
    return part


def _plain(value: Any, what: str) -> JSON:
    """The value in JSON's types and tagged forms; a tuple is a list. Raises DataError."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Image | PILImage.Image):
        return image_form(Image(value), {})
    if isinstance(value, list | tuple):
        return [_plain(inner, what) for inner in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        plain = {key: _plain(inner, what) for key, inner in value.items()}
        return {"type": OBJECT, "data": plain} if _tag(plain) else plain
    for tag, (kind, write, _) in TAGS.items():
        if isinstance(value, kind):
            return {"type": tag, "data": write(value)}
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), what)
    raise DataError(f"{what} holds {repr(value)[:80]}, which does not travel as JSON")


def _tag(form: Mapping[str, Any]) -> str | None:
    """What a form is tagged as; None for a plain object."""
    tag = form.get("type")
    if form.keys() == {"type", "sha256", "data"} and tag == "image":
        return "image"
    return tag if form.keys() == {"type", "data"} and isinstance(tag, str) and tag in (*TAGS, OBJECT) else None


def read_plain(value: JSON) -> Any:
    """A label, or a value of a row. Raises DataError."""
    if isinstance(value, list):
        return [read_plain(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    tag = _tag(value)
    if tag == "image":
        return read_image(value, {})
    if tag in TAGS:
        return _read_tagged(tag, value["data"])
    inside = value["data"] if tag == OBJECT and isinstance(value["data"], Mapping) else value
    return {key: read_plain(inner) for key, inner in inside.items()}


def _read_tagged(tag: str, data: JSON) -> Any:
    try:
        return TAGS[tag][2](data)
    except (ArithmeticError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{repr(data)[:80]} is no {tag}: {error}") from None
