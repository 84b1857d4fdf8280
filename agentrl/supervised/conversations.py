"""Rows of a dataset as conversations: whole ones, prompts with answers, pairs of answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.supervised import AnswersSection, PairsSection
from ..env import Task
from ..errors import DataError
from ..messages import Image, Message, normalize

ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}
"""Names of the roles in conversations with the keys `from` and `value`."""


def conversation(task: Task, section: AnswersSection) -> list[Message]:
    """The messages of a row. Raises DataError."""
    prompt = _opening(task)
    if section.answer_key is None:
        if isinstance(task.prompt, str):
            raise DataError(
                f"{section.input_key!r} is a text, not a list of chat messages: name the column with the answer with "
                "--data.answer-key, or train on the text alone with --sft.pretrain"
            )
        return prompt
    return [*prompt, *_answer(task.row, section.answer_key)]


def pair(task: Task, section: PairsSection) -> tuple[list[Message], list[Message]]:
    """(conversation with the better answer, with the worse one): the answers alone are to be trained. Raises DataError."""
    prompt = [] if section.input_key == section.chosen_key else [_untrained(m) for m in _opening(task)]
    return _answered(task, prompt, section.chosen_key), _answered(task, prompt, section.rejected_key)


def tools_of(row: Mapping[str, Any], key: str | None) -> list[dict[str, Any]]:
    """The tools of a row."""
    value = _column(row, key) if key is not None else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{key!r} holds no JSON: {error}") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{key!r} is no list of tools: {repr(value)[:80]}")
    return value


def margin_of(row: Mapping[str, Any], key: str | None) -> float:
    """The margin of a pair; 0 without a column for it."""
    value = 0.0 if key is None else _column(row, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{key!r} is {value!r}, no margin")
    return float(value)


def _opening(task: Task) -> list[Message]:
    """The prompt with the row's images: in messages they stand already, before a text they are put."""
    if isinstance(task.prompt, list):
        return placed(task.prompt, ())
    return placed([{"role": "user", "content": task.prompt or ""}], task.images)


def placed(messages: Sequence[Any], images: Sequence[Image]) -> list[Message]:
    """Messages in their normal form, each `{"type": "image"}` without a picture filled from `images`."""
    rest = list(images)
    told = [_message(message, rest) for message in messages]
    if rest and len(rest) == len(images):
        first = next((message for message in told if message["role"] == "user"), None)
        if first is None:
            raise DataError(f"there are {len(images)} images and no message of a user to show them in")
        content = first["content"]
        first["content"] = [*rest, *(content if isinstance(content, list) else [content])]
    elif rest:
        raise DataError(f"there are {len(images)} images, and places for {len(images) - len(rest)}")
    return normalize(told) if told else []


def _message(message: Any, images: list[Image]) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"a chat message is a dict with a role and a content, not {repr(message)[:80]}")
    told = {key: value for key, value in message.items() if value is not None}
    if "role" not in told and "from" in told and "value" in told:
        told = {"role": ROLES.get(told["from"], told["from"]), "content": told["value"]}
    content = told.get("content", "")
    if isinstance(content, list):
        content = [_part(part, images) for part in content]
    return {**told, "content": content}


def _part(part: Any, images: list[Image]) -> Any:
    if not isinstance(part, Mapping):
        return part
    told = {key: value for key, value in part.items() if value is not None}
    if told == {"type": "image"}:
        if not images:
            raise DataError("a message has a place for an image, and the row has no image left (--data.image-key)")
        return images.pop(0)
    return told


def _answered(task: Task, prompt: list[Message], key: str) -> list[Message]:
    """A list that does not begin with an assistant's message is a whole conversation, with the prompt in it."""
    answer = _answer(task.row, key, task.images)
    if answer[0]["role"] == "assistant":
        if not prompt:
            raise DataError(f"{key!r} holds no prompt: name the column that does with --data.input-key")
        return [*prompt, *answer]
    return [*(_untrained(message) for message in answer[:-1]), answer[-1]]


def _answer(row: Mapping[str, Any], key: str, images: Sequence[Image] = ()) -> list[Message]:
    value = _column(row, key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} is {repr(value)[:60]}, neither a text nor chat messages")
    whole = isinstance(value[0], Mapping) and value[0].get("role", value[0].get("from")) not in ("assistant", "gpt")
    return placed(value, images if whole else ())


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _column(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise DataError(f"there is no column {key!r}. There are: {', '.join(row)}")
    return row[key]
