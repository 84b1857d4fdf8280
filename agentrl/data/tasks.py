"""Rows to tasks: checked once before anything loads, made when looked at. Errors name the row and the columns found."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..config import DataSection
from ..config.where import dataset_labels
from ..env import Task
from ..errors import DataError
from .bar import checking
from .mixture import mixed
from .rows import Row, Rows, open_rows
from .shown import cell, read_row

log = logging.getLogger(__name__)
NAMED = 5
"""How many of the rows that are left out a message names."""


@dataclass(frozen=True)
class RowTasks(Sequence[Task]):
    """Tasks of the rows of one or several datasets. Position p is row `numbers[p]` of dataset `which[p]`; the ids are
    `row-N`, of several datasets `NAME/row-N`. Raises DataError with the row's number; where `on_error` says skip, the next
    row stands in the place of one that cannot be read now.

    `max_images` = most pictures of a row, `skipped` = rows that cannot be read and are left out.
    """

    sources: Sequence[Rows]
    section: DataSection
    which: NDArray[np.int32]
    numbers: NDArray[np.int64]
    max_images: int = 0
    labels: Sequence[str] = field(default=())
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> RowTasks: ...
    def __getitem__(self, index: int | slice) -> Task | RowTasks:
        if isinstance(index, slice):
            return self.at(index)
        if self.section.on_error == "error":
            return self._task(index)
        first = range(len(self))[index]
        for position in itertools.chain(range(first, len(self)), range(first)):
            try:
                return self._task(position)
            except DataError as error:
                log.warning("skipped, the next row stands in its place: %s", error)
        raise DataError(f"{self.name}: no row is left to use")

    def _task(self, index: int) -> Task:
        source, number = int(self.which[index]), int(self.numbers[index])
        rows = self.sources[source]
        task = row_task(number, rows.row(number), self.section, rows)
        return replace(task, id=f"{self.labels[source]}/{task.id}") if len(self.sources) > 1 else task

    def at(self, positions: slice | NDArray[Any]) -> RowTasks:
        """The tasks at these positions."""
        return replace(self, which=self.which[positions], numbers=self.numbers[positions])

    def keep(self, wanted: Callable[[Task], bool], why: str) -> RowTasks:
        """The tasks for which `wanted` is true; those left out are counted and shown. What it raises as DataError stops, or
        with `on_error = skip` leaves the row out as well. Raises DataError when none is left.
        """
        good, dropped, bad = array("q"), array("q"), array("q")
        for position, row in checking(self._rows(), self.name, len(self)):
            try:
                (good if self._wanted(position, row, wanted) else dropped).append(position)
            except DataError as error:
                if self.section.on_error == "error":
                    raise error
                bad.append(position)
        for what, out in ((f"are {why}", dropped), ("cannot be read", bad)):
            some = [f"row {int(self.numbers[position])}" for position in out[:NAMED]]
            _say(f"{self.name}: {len(out)} of {len(self)} rows {what} and are left out", some, len(out))
        if not good:
            raise DataError(f"{self.name}: no row is left to use, all {len(self)} are {why} or cannot be read.")
        return replace(self.at(np.asarray(good, np.int64)), skipped=self.skipped + len(bad))

    def error(self, position: int, what: str) -> DataError:
        """What is wrong with the row of a task, with its number."""
        return self.sources[int(self.which[position])].error(int(self.numbers[position]), what)

    def folder(self, position: int) -> Path:
        """What paths in the row of a task are relative to."""
        return self.sources[int(self.which[position])].folder

    def _rows(self) -> Iterator[tuple[int, Row | DataError]]:
        """(position, row) of every position, in order; read in blocks."""
        block = min(rows.at_once for rows in self.sources)
        for start in range(0, len(self), block):
            which = self.which[start : start + block]
            found: dict[int, Row | DataError] = {}
            for source in np.unique(which):
                places = np.flatnonzero(which == source) + start
                found |= zip(places, self.sources[source].many(self.numbers[places].tolist()), strict=True)
            yield from sorted(found.items(), key=lambda item: item[0])

    def _wanted(self, position: int, row: Row | DataError, wanted: Callable[[Task], bool]) -> bool:
        """Rows with pictures that the check leaves closed are kept as they are."""
        if isinstance(row, DataError):
            raise row
        number, rows = int(self.numbers[position]), self.sources[int(self.which[position])]
        closed = self.section.check_images is not None and number >= self.section.check_images
        if closed and read_row(row, self.section, rows.folder, unseen=True).images:
            return True
        task = row_task(number, row, self.section, rows)
        try:
            return wanted(task)
        except DataError as error:
            raise rows.error(number, str(error)) from error

    def by_dataset(self) -> list[RowTasks]:
        """The tasks of each dataset, in the order of the datasets; their ids stay."""
        return [self.at(np.flatnonzero(self.which == source)) for source in range(len(self.sources))]

    @property
    def name(self) -> str:
        return ", ".join(rows.name for rows in self.sources)


def row_task(number: int, row: Row, section: DataSection, rows: Rows | None = None) -> Task:
    """One row as a task. Raises DataError with its number; pictures are opened here."""
    name, folder = (rows.name, rows.folder) if rows is not None else _place(section)
    try:
        shown = read_row(row, section, folder)
        for image in shown.images:
            image.pil.load()
        label = None if section.label_key is None else cell(row, section.label_key)
    except DataError as error:
        raise DataError(f"row {number} of {name}: {error}") from error
    return Task(f"row-{number}", shown.prompt, label, shown.images, row, tools=shown.tools)


def _place(section: DataSection) -> tuple[str, Path]:
    path = section.path[0] if section.path else "the data"
    return path, Path(path).parent


def load_rows(section: DataSection, *, evaluation: bool = False) -> list[Rows]:
    """The datasets of `path`, or of `test_path` for evaluation, with the columns the section names. Raises DataError."""
    paths = section.test_path if evaluation else section.path
    split = section.test_split or section.split if evaluation else section.split
    try:
        sources = [open_rows(path, split) for path in paths]
    except DataError as error:
        raise DataError(str(error).replace("--data.path", "--data.test-path", evaluation)) from error
    for rows in sources:
        _check_columns(rows, section)
    return sources


def load_tasks(section: DataSection, *, evaluation: bool, seed: int = 0) -> RowTasks:
    """The tasks of the datasets of `path`, or of `test_path` for evaluation; mixed by `probs` and the seed.

    Every row is looked at once. Raises DataError for a missing file or column, and for a row that is no task unless
    `on_error` says skip.
    """
    sources = load_rows(section, evaluation=evaluation)
    checked = [_readable(rows, section) for rows in sources]
    tasks = RowTasks(
        sources,
        section,
        *mixed([numbers for numbers, _, _ in checked], [] if evaluation else section.probs, seed),
        max_images=max(images for _, images, _ in checked),
        labels=dataset_labels([rows.name for rows in sources]),
        skipped=sum(skipped for _, _, skipped in checked),
    )
    return tasks


def _readable(rows: Rows, section: DataSection) -> tuple[NDArray[np.int64], int, int]:
    """(numbers of those of the first `max_samples` rows that are tasks, most pictures of one, how many are none). Raises
    DataError.
    """
    good = array("q")
    bad: list[str] = []
    images = 0
    limit = len(rows) if section.max_samples is None else section.max_samples
    for seen, (number, row) in enumerate(checking(rows.scan(), rows.name, min(limit, len(rows)))):
        if seen >= limit:
            break
        try:
            images = max(images, _check_row(number, row, section, rows, seen))
        except DataError as error:
            if section.on_error == "error":
                raise
            log.warning("skipped: %s", error) if len(bad) < NAMED else None
            bad.append(f"row {number}")
            continue
        good.append(number)
    _say(f"{rows.name}: {len(bad)} of {len(good) + len(bad)} rows skipped", bad[:NAMED], len(bad))
    if not good:
        raise DataError(f"{rows.name}: no row is left to use")
    return np.asarray(good, np.int64), images, len(bad)


def _check_row(number: int, row: Row | DataError, section: DataSection, rows: Rows, seen: int) -> int:
    """How many pictures a row has; they are opened in the first `check_images` rows. Raises DataError."""
    if isinstance(row, DataError):
        raise row
    if section.check_images is None or seen < section.check_images:
        return len(row_task(number, row, section, rows).images)
    try:
        if section.label_key is not None:
            cell(row, section.label_key)
        return len(read_row(row, section, rows.folder, unseen=True).images)
    except DataError as error:
        raise rows.error(number, str(error)) from error


def _say(what: str, some: Sequence[str], count: int) -> None:
    if count:
        log.warning("%s: %s%s", what, ", ".join(some), " …" if count > len(some) else "")


def _check_columns(rows: Rows, section: DataSection) -> None:
    wanted = {
        "input": section.input_key,
        "label": section.label_key,
        "image": section.image_key,
        "tools": section.tools_key,
    }
    for kind, column in wanted.items():
        if column is not None and not rows.has(column):
            raise rows.without(column, f"--data.{kind}-key")
