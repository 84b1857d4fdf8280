"""Datasets of prompts: rows to tasks. `datasets` does the reading; errors name the row and the columns found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from .config import DataSection
from .env import Task
from .errors import DataError
from .messages import Image

log = logging.getLogger(__name__)

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class RowTasks(Sequence[Task]):
    """The rows of a dataset as tasks, made when looked at; row i is task `row-i`. Raises DataError with the row's number."""

    def __init__(self, rows: Any, section: DataSection, indices: Sequence[int]) -> None:
        self._rows = rows
        self._section = section
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> RowTasks: ...
    def __getitem__(self, index: int | slice) -> Task | RowTasks:
        if isinstance(index, slice):
            return RowTasks(self._rows, self._section, self._indices[index])
        number = self._indices[index]
        return row_task(number, self._rows[number], self._section)


def row_task(number: int, row: dict[str, Any], section: DataSection) -> Task:
    """One row as a task. Raises DataError."""
    prompt = row.get(section.input_key)
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(f"row {number} of {section.path}: {section.input_key!r} is {repr(prompt)[:60]}, not a prompt")
    label = None if section.label_key is None else row[section.label_key]
    try:
        images = _images(row.get(section.image_key), section) if section.image_key else ()
    except DataError as error:
        raise DataError(f"row {number} of {section.path}: {error}") from error
    return Task(id=f"row-{number}", prompt=prompt, label=label, images=images, row=row)


def _images(value: Any, section: DataSection) -> tuple[Image, ...]:
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_image(item, Path(section.path or ".").parent) for item in items)


def _image(item: Any, folder: Path) -> Image:
    """One image of a row: path (relative to the data file), bytes, {bytes, path}, data URL or PIL."""
    if isinstance(item, dict):
        item = item["bytes"] if item.get("bytes") else item.get("path")
    if isinstance(item, str) and item.startswith(("http://", "https://")):
        raise DataError(f"images are not fetched from the network: {item[:80]}")
    if isinstance(item, str) and not item.startswith("data:"):
        item = folder / item
    image = Image(item)
    image.pil.load()
    return image


def load_tasks(section: DataSection, *, evaluation: bool) -> RowTasks:
    """The tasks of a dataset: of `path`, or of `test_path` for evaluation.

    Every row is looked at once. Raises DataError for a missing file or column, and for a row that is no task unless
    `on_error` says skip.
    """
    if evaluation:
        section = section.model_copy(update={"path": section.test_path})
    rows = _read(section)
    _check_columns(rows, section)
    wanted = range(len(rows) if section.max_samples is None else min(len(rows), section.max_samples))
    indices = _readable(rows, section, wanted)
    if not indices:
        raise DataError(f"{section.path}: no row is left to use")
    return RowTasks(rows, section, indices)


def _readable(rows: Any, section: DataSection, indices: Sequence[int]) -> list[int]:
    good: list[int] = []
    for number in indices:
        try:
            row_task(number, rows[number], section)
            good.append(number)
        except DataError as error:
            if section.on_error == "error":
                raise
            log.warning("skipped: %s", error)
    if len(good) < len(indices):
        log.warning("%d of %d rows skipped", len(indices) - len(good), len(indices))
    return good


def _read(section: DataSection) -> Any:
    import datasets

    datasets.disable_progress_bars()
    path = Path(section.path or "")
    reader = READERS.get(path.suffix)
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"--data.path {path}: the file is empty")
    if reader is not None and not path.is_file():
        raise DataError(f"--data.path {path}: there is no such file")
    try:
        if reader is not None:
            return datasets.load_dataset(reader, data_files=str(path), split="train")
        return datasets.load_dataset(str(section.path), split=section.split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        raise DataError(f"--data.path {section.path}: {str(cause).splitlines()[0][:300]}") from error


def _check_columns(rows: Any, section: DataSection) -> None:
    wanted = {"input": section.input_key, "label": section.label_key, "image": section.image_key}
    for kind, column in wanted.items():
        if column is not None and column not in rows.column_names:
            raise DataError(
                f"{section.path} has no column {column!r} (--data.{kind}-key). It has: {', '.join(rows.column_names)}."
            )
