"""From configuration to examples: what is read, spelled, cut and left out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DpoConfig, RmConfig, SftConfig, SupervisedConfig
from ..config.supervised import AnswersSection, PairsSection, TextsSection
from ..data import RowTasks, load_tasks
from ..env import Task
from ..errors import ConfigError, DataError
from ..image_store import ImageStore
from ..renderer import Renderer
from .conversations import conversation, margin_of, pair
from .examples import Examples, ExamplesOnDemand, Item, Pair, as_row, rows_of
from .pieces import Pieces
from .recorded import are_recorded
from .spelling import Speller, Spelling, said
from .trajectories import recorded_examples

log = logging.getLogger(__name__)
EMPTY, TOO_LONG, UNREADABLE = "nothing to train", "longer than train.max_len", "unreadable"
ALIKE = "chosen and rejected are the same"
Told = Callable[[float], None]
AT_ONCE = 20_000
"""Rows that are spelled before the run starts; of more, each is spelled when its turn comes."""
NOT_KEPT = np.zeros(0, np.int32)
LOOKED_AT = 2000
"""Rows of which then is said what they are like."""
TEXTS_LOOKED_AT = 200
"""The same of texts to pretrain on, any of which may be a book."""


class LeftOutError(Exception):
    """A row that is no example; the message is the reason."""


def load_examples(
    config: SupervisedConfig, renderer: Renderer, store: ImageStore | None, told: Told, *, held_out: bool = False
) -> Examples:
    """The training examples, or those of `data.test_path`. Pictures go into the store; `told` is given the share done.

    Raises DataError for a file or row that cannot be read (unless `data.on_error` says skip), and when nothing is left;
    ConfigError for options that recorded episodes, or rows, have no use for.
    """
    section = config.data
    paths = section.test_path if held_out else section.path
    path = ", ".join(paths)
    if isinstance(config, SftConfig) and are_recorded(config, held_out=held_out):
        found = recorded_examples(paths, config, Speller(renderer), renderer, store)
    else:
        if isinstance(config, SftConfig) and config.sft.pretrain:
            section = TextsSection(**section.model_dump())
        tasks = load_tasks(section, evaluation=held_out, seed=config.run.seed)
        _check_columns(tasks, config)
        maker = _Maker(config, renderer, store)
        if held_out or len(tasks) <= AT_ONCE:
            found = maker.examples(tasks[: config.eval.samples] if held_out else tasks, told)
        elif isinstance(config, SftConfig) and config.sft.pretrain:
            found = maker.pieces(tasks, told)
        else:
            found = maker.later(tasks, told)
        if tasks.skipped:
            found.left_out[UNREADABLE] += tasks.skipped
    if held_out:
        found.items = found.items[: config.eval.samples]
    if not found.items:
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
        raise DataError(f"{path}: no example is left to use ({reasons or 'it is empty'}).")
    return found


def _check_columns(tasks: RowTasks, config: SupervisedConfig) -> None:
    """Every dataset has the columns that the options name. Raises DataError that names the flag."""
    data = config.data
    names = ("answer_key",) if isinstance(data, AnswersSection) else ("chosen_key", "rejected_key", "margin_key")
    for name in names:
        key = getattr(data, name)
        for rows in tasks.sources:
            if key is not None and not rows.has(key):
                raise rows.without(key, f"--data.{name.replace('_', '-')}")


class _Maker:
    """Spells the rows of a dataset for one kind of training."""

    def __init__(self, config: SupervisedConfig, renderer: Renderer, store: ImageStore | None) -> None:
        self._config = config
        self._speller = Speller(renderer)
        self._store = store
        self._max_len = config.train.max_len
        self._cut = 0

    def examples(self, tasks: RowTasks, told: Told) -> Examples:
        """All of them, now."""
        made = Examples()
        for i in range(len(tasks)):
            told((i + 1) / len(tasks))
            made.items += self._of_row(tasks, i, made.left_out)
        made.cut = self._cut
        return made

    def later(self, tasks: RowTasks, told: Told) -> ExamplesOnDemand:
        """The first ones now, to see what the data are like, and each of them again when its turn comes."""
        first = self.examples(tasks[:LOOKED_AT], told)
        later: Counter[str] = Counter()
        return ExamplesOnDemand(
            first.items,
            first.left_out,
            first.cut,
            count=len(tasks),
            looked_at=LOOKED_AT,
            make=lambda i: self._of_row(tasks, i, later),
        )

    def pieces(self, tasks: RowTasks, told: Told) -> ExamplesOnDemand:
        """The pieces of texts. One of fewer bytes than a piece has tokens is one piece, as no token stands for less than a byte:
        it is spelled when its turn comes. The tokens of longer texts are found now and kept on disk.
        """
        first = self.examples(tasks[:TEXTS_LOOKED_AT], lambda share: None)
        kept, later = Pieces(), Counter[str]()
        around = len(self._speller.plain("x"))
        for i in range(len(tasks)):
            told((i + 1) / len(tasks))
            text = tasks[i].prompt
            if isinstance(text, str) and len(text.encode(errors="replace")) + around <= self._max_len:
                kept.add(i, [NOT_KEPT])
            else:
                kept.add(i, [row.token_ids for row in rows_of(self._of_row(tasks, i, later))])

        def made(number: int) -> list[Item]:
            row, place, ids = kept[number]
            if not len(ids):
                return self._of_row(tasks, row, later)
            return [_piece(tuple(ids.tolist()), f"{tasks[row].id}-{place}")]

        return ExamplesOnDemand(
            first.items,
            first.left_out,
            first.cut,
            count=len(kept),
            looked_at=TEXTS_LOOKED_AT,
            unit="pieces",
            make=made,
        )

    def _of_row(self, tasks: RowTasks, i: int, left_out: Counter[str]) -> list[Item]:
        """What a row gives; a reason in `left_out` where it gives nothing. Raises DataError."""
        task = tasks[i]
        try:
            return list(self._items(task, tasks.folder(i)))
        except LeftOutError as error:
            left_out[str(error)] += 1
        except DataError as error:
            if self._config.data.on_error == "error":
                raise tasks.error(i, str(error)) from error
            log.warning("skipped %s: %s", task.id, error)
            left_out[UNREADABLE] += 1
        return []

    def _items(self, task: Task, folder: Path) -> Iterator[Item]:
        config = self._config
        if isinstance(config, SftConfig):
            return self._texts(task) if config.sft.pretrain else iter([self._answer(task, config, folder)])
        if not isinstance(config, RmConfig | DpoConfig):
            raise ConfigError(f"there are no examples for {config.kind}")
        return iter([self._pair(task, config.data, folder)])

    def _texts(self, task: Task) -> Iterator[Item]:
        if not isinstance(task.prompt, str):
            raise DataError(f"--sft.pretrain wants a text, not {repr(task.prompt)[:60]}")
        if not task.prompt:
            raise LeftOutError(EMPTY)
        whole, size = self._speller.plain(task.prompt), self._max_len
        self._cut += len(whole) > size
        for start in range(0, len(whole), size):
            ids = whole.token_ids[start : start + size]
            if len(ids) > 1:
                yield _piece(ids, f"{task.id}-{start // size}")

    def _answer(self, task: Task, config: SftConfig, folder: Path) -> Item:
        messages = conversation(task, config.data, folder)
        spoken = [said(message) for message in messages if message["role"] == "assistant"]
        if not any(spoken[-1:] if config.sft.turns == "last" else spoken):
            raise LeftOutError(EMPTY)
        spelling = self._speller.spell(messages, task.tools, last_only=config.sft.turns == "last")
        kept = spelling.cut(self._max_len)
        if not any(kept.trained):
            raise LeftOutError(EMPTY if len(spelling) <= self._max_len else TOO_LONG)
        self._cut += len(kept) < len(spelling)
        return as_row(kept, task.id, self._store)

    def _pair(self, task: Task, section: PairsSection, folder: Path) -> Item:
        chosen, rejected = (self._side(messages, task.tools) for messages in pair(task, section, folder))
        if (chosen.token_ids, chosen.images) == (rejected.token_ids, rejected.images):
            raise LeftOutError(ALIKE)
        margin = margin_of(task.row, section.margin_key)
        scored = isinstance(self._config, RmConfig)
        rows = [
            as_row(spelling, f"{task.id}-{name}", self._store, last_only=scored)
            for spelling, name in ((chosen, "chosen"), (rejected, "rejected"))
        ]
        return Pair(rows[0], rows[1], margin)

    def _side(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Spelling:
        if messages[-1]["role"] != "assistant" or not said(messages[-1]):
            raise LeftOutError(EMPTY)
        spelling = self._speller.spell(messages, tools)
        if not any(spelling.trained):
            raise LeftOutError(EMPTY)
        if len(spelling) > self._max_len:
            raise LeftOutError(TOO_LONG)
        return spelling


def _piece(ids: tuple[int, ...], name: str) -> Item:
    """Of a text: all of it is trained but the first token, which nothing predicts."""
    return as_row(Spelling(ids, (False, *[True] * (len(ids) - 1))), name, None)
