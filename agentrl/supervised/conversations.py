"""Rows of a dataset as conversations: whole ones, prompts with answers, pairs of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import DataSection
from ..config.supervised import AnswersSection, PairsSection
from ..data.shown import cell, read_row, role_of
from ..env import Task, opening
from ..errors import DataError
from ..messages import Message, normalize


def conversation(task: Task, section: AnswersSection, folder: Path) -> list[Message]:
    """The messages of a row; paths of pictures in an answer are relative to `folder`. Raises DataError."""
    if section.answer_key is not None:
        unseen = section.model_copy(update={"image_key": None})
        return [*opening(task), *_answer(task.row, section.answer_key, unseen, folder)]
    if isinstance(task.prompt, str):
        raise DataError(
            f"{section.input_key!r} is a text, not a list of chat messages: name the column with the answer with "
            "--data.answer-key, or train on the text alone with --sft.pretrain"
        )
    return opening(task)


def pair(task: Task, section: PairsSection, folder: Path) -> tuple[list[Message], list[Message]]:
    """(conversation with the better answer, with the worse one): the answers alone are to be trained. Raises DataError."""
    prompt = [] if section.input_key == section.chosen_key else [_untrained(m) for m in opening(task)]
    better, worse = (_answer(task.row, key, section, folder) for key in (section.chosen_key, section.rejected_key))
    return _answered(prompt, better, section.chosen_key), _answered(prompt, worse, section.rejected_key)


def margin_of(row: Mapping[str, Any], key: str | None) -> float:
    """The margin of a pair; 0 without a column for it."""
    value = 0.0 if key is None else cell(row, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{key!r} is {value!r}, no margin")
    return float(value)


def _answered(prompt: list[Message], answer: list[Message], key: str) -> list[Message]:
    """A list that does not begin with an assistant's message is a whole conversation, with the prompt in it."""
    if answer[0]["role"] != "assistant":
        return [*(_untrained(message) for message in answer[:-1]), answer[-1]]
    if not prompt:
        raise DataError(f"{key!r} holds no prompt: name the column that does with --data.input-key")
    return [*prompt, *answer]


def _answer(row: Mapping[str, Any], key: str, section: DataSection, folder: Path) -> list[Message]:
    """A column as messages; a number is its text. The row's pictures belong to its prompt: a whole conversation alone shows
    them.
    """
    value = cell(row, key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{key!r} is {repr(value)[:60]}, neither a text nor chat messages")
    images = None if role_of(value[0]) == "assistant" else section.image_key
    column = section.model_copy(update={"input_key": key, "image_key": images, "tools_key": None, "template": None})
    return normalize(read_row(row, column, folder).prompt)


def _untrained(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message
