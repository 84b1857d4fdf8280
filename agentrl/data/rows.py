"""The rows of one dataset, whatever it is stored in, with the types they were stored with.

Lines of JSON are kept as text in the memory-mapped table that `datasets` makes of them, and parsed when a row is looked at:
every row has the types its own line says, and a line that is no JSON is one bad row, not a bad file.
"""

from __future__ import annotations

import glob
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..errors import DataError
from .cells import read_cells
from .lines import MARK, SURROGATE, check_encoding, mark_bytes, not_a_row, not_lines, read_line

Row = dict[str, Any]
READERS = {".jsonl": "lines", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
PACKED = (".gz", ".bz2", ".xz", ".zst")
LOOKED_AT = 100
"""Rows at the start whose columns a message shows."""
LINES = 10**6
"""Lines at the start that are looked at to say what a file is, when it has no rows."""
BATCH, BATCH_BYTES = 1000, 2**25
"""Most rows, and about how many bytes, that are read at once: rows with pictures may have megabytes."""


class Rows(ABC):
    """Rows by number, from 0; the same number is the same row every time. `name` is what messages call the dataset, paths in
    it are relative to `folder`, and `at_once` of its rows are read together.
    """

    def __init__(self, name: str, folder: Path, at_once: int = BATCH) -> None:
        self.name = name
        self.folder = folder
        self.at_once = at_once

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def columns(self) -> list[str]: ...

    def has(self, column: str) -> bool:
        """Whether a row has it: where rows differ, they are all looked at until one has."""
        return column in self.columns or any(isinstance(row, dict) and column in row for _, row in self.scan())

    def without(self, column: str, flag: str) -> DataError:
        """The error of a dataset none of whose rows has the column that the flag names: where none is a row, the first's."""
        if not self.columns and (first := next((row for _, row in self.scan() if isinstance(row, DataError)), None)):
            return first
        return DataError(f"{self.name} has no column {column!r} ({flag}). It has: {', '.join(self.columns)}.")

    @abstractmethod
    def row(self, number: int) -> Row:
        """Raises DataError with the number when there is something else than a row."""

    def many(self, numbers: list[int]) -> list[Row | DataError]:
        """The rows of these numbers, or what is wrong with them."""
        return [self._row_or_error(number) for number in numbers]

    def _row_or_error(self, number: int) -> Row | DataError:
        try:
            return self.row(number)
        except DataError as error:
            return error

    @abstractmethod
    def scan(self) -> Iterator[tuple[int, Row | DataError]]:
        """(number, row or what is wrong with it) of every row, in order; blank lines are left out."""

    def error(self, number: int, what: str) -> DataError:
        return DataError(f"row {number} of {self.name}: {what}")


class TableRows(Rows):
    """A table of `datasets`: parquet, csv, arrow, hub, disk. Memory-mapped. `bad` = what is wrong with rows that are there
    but cannot be used.
    """

    def __init__(self, name: str, folder: Path, table: Any, bad: Mapping[int, str] | None = None) -> None:
        super().__init__(name, folder, _at_once(table))
        self._table = _undecoded(table)
        self._bad = bad or {}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def columns(self) -> list[str]:
        return list(self._table.column_names)

    def has(self, column: str) -> bool:
        return column in self.columns

    def row(self, number: int) -> Row:
        if number in self._bad:
            raise self.error(number, self._bad[number])
        return dict(self._table[number])

    def many(self, numbers: list[int]) -> list[Row | DataError]:
        return [self._checked(n, row) for n, row in zip(numbers, _transposed(self._table[numbers]), strict=True)]

    def scan(self) -> Iterator[tuple[int, Row | DataError]]:
        for start in range(0, len(self), self.at_once):
            for number, row in enumerate(_transposed(self._table[start : start + self.at_once]), start):
                yield number, self._checked(number, row)

    def _checked(self, number: int, row: Row) -> Row | DataError:
        return self.error(number, self._bad[number]) if number in self._bad else row


class LineRows(Rows):
    """A table with one line of JSON a row."""

    def __init__(self, name: str, folder: Path, table: Any) -> None:
        super().__init__(name, folder, _at_once(table))
        self._table = table
        self._columns: list[str] | None = None

    def __len__(self) -> int:
        return len(self._table)

    @property
    def columns(self) -> list[str]:
        if self._columns is None:
            lines = self._table[:LOOKED_AT]["text"]
            rows = [self._parse(i, line) for i, line in enumerate(lines) if line.strip()]
            self._columns = list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))
        return self._columns

    def without(self, column: str, flag: str) -> DataError:
        """Says what else the lines are, where they are no rows at all."""
        cause = self._other(column)
        return DataError(f"--data.path {self.name}: {cause}") if cause else super().without(column, flag)

    def has(self, column: str) -> bool:
        """Raises DataError when the lines are those of one value, so that some might be taken for rows."""
        first = next((line for line in self._table[:LOOKED_AT]["text"] if line.strip()), "{}")
        if isinstance(self._parse(0, first), DataError) and (cause := self._other(column)):
            raise DataError(f"--data.path {self.name}: {cause}")
        return super().has(column)

    def _other(self, column: str) -> str:
        return not_lines("\n".join(self._table[:LINES]["text"]), column)

    def row(self, number: int) -> Row:
        row = self._parse(number, self._table[number]["text"])
        if isinstance(row, DataError):
            raise row
        return row

    def many(self, numbers: list[int]) -> list[Row | DataError]:
        return [self._parse(n, line) for n, line in zip(numbers, self._table[numbers]["text"], strict=True)]

    def scan(self) -> Iterator[tuple[int, Row | DataError]]:
        for start in range(0, len(self), self.at_once):
            for offset, line in enumerate(self._table[start : start + self.at_once]["text"]):
                if line and not line.isspace():
                    yield start + offset, self._parse(start + offset, line)

    def _parse(self, number: int, line: str) -> Row | DataError:
        if MARK in line:
            return self.error(number, f"not UTF-8: there is a byte 0x{line.partition(MARK)[2][:2]} in it")
        try:
            row = read_line(line)
        except (ValueError, RecursionError) as error:
            return self.error(number, f"no JSON: {error}")
        what = not_a_row(row, line)
        return self.error(number, what) if what else row


class ListRows(Rows):
    """Rows of a JSON file that is one list. `escapes` = its text where it may hold halves of surrogate pairs, else nothing."""

    def __init__(self, name: str, folder: Path, listed: list[Any], escapes: str = "") -> None:
        super().__init__(name, folder)
        self.listed = listed
        self.escapes = escapes

    def __len__(self) -> int:
        return len(self.listed)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.listed[:LOOKED_AT] if isinstance(row, dict) for key in row))

    def row(self, number: int) -> Row:
        row = self.listed[number]
        what = not_a_row(row, self.escapes)
        if what:
            raise self.error(number, what)
        return dict(row)

    def scan(self) -> Iterator[tuple[int, Row | DataError]]:
        for number in range(len(self)):
            yield number, self._row_or_error(number)


def _transposed(batch: dict[str, list[Any]]) -> Iterator[Row]:
    """The rows of a batch of columns."""
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def open_rows(path: str, split: str = "train") -> Rows:
    """The rows of a file, a folder, or a hub id (`ID@NAME`: one of its configurations, or a folder in it).

    Nothing is checked but that it can be read. Raises DataError.
    """
    import datasets

    datasets.disable_progress_bars()
    place = Path(path).expanduser()
    kind = file_kind(place)
    if place.is_file() and not place.stat().st_size:
        raise DataError(f"--data.path {path}: the file is empty")
    if kind is not None and not place.exists():
        raise DataError(f"--data.path {path}: there is no such file")
    if place.is_file() and kind is None:
        raise DataError(f"--data.path {path}: files are read by their ending: {', '.join(READERS)}.")
    if place.is_file() and split != "train":
        raise DataError(f"--data.path {path} is one file, and has no split {split!r}.")
    try:
        return _open(path, place, kind, split)
    except DataError:
        raise
    except Exception as error:  # `datasets` and the hub's client raise nearly anything
        cause = error.__cause__ or error
        said = " ".join(str(cause).split()) or type(cause).__name__
        absent = "" if place.exists() else "no such file or folder here, and the hub does not give it: "
        raise DataError(f"--data.path {path}: {absent}{said[:400]}") from error


def file_kind(path: Path) -> str | None:
    """How a file is read, by its ending; None for anything else. Of packed files those with lines of JSON are read."""
    if path.suffix not in PACKED:
        return READERS.get(path.suffix)
    packed = READERS.get(path.with_suffix("").suffix)
    return packed if packed in ("lines", "json") else None


def _open(path: str, place: Path, kind: str | None, split: str) -> Rows:
    if place.is_dir() and not _has_configurations(place):
        return _folder(path, place, split)
    if not place.is_file():
        return _hub(path, split)
    if kind == "json" and _first_character(place) == "[":
        return _document(path, place)
    if kind in ("lines", "json"):
        return LineRows(path, place.parent, _lines([str(place)]))
    if kind == "csv":
        return _cells(path, place.parent, [place])
    assert kind is not None
    return TableRows(path, place.parent, _table(kind, [str(place)]))


def _table(kind: str, files: list[str], **options: Any) -> Any:
    """The rows of files, whose names are no patterns."""
    import datasets

    return datasets.load_dataset(kind, data_files=[glob.escape(file) for file in files], split="train", **options)


def _cells(path: str, folder: Path, files: list[Path]) -> TableRows:
    import datasets

    tables, bad = list[Any](), dict[int, str]()
    for file in files:
        table, wrong = read_cells(file)
        bad |= {sum(map(len, tables)) + number: what for number, what in wrong.items()}
        tables.append(table)
    return TableRows(path, folder, datasets.concatenate_datasets(tables), bad)


def _lines(files: list[str]) -> Any:
    """Bytes that are no UTF-8 become the MARK and two hexadecimal digits, so that their row is a bad one."""
    for file in files:
        if Path(file).suffix not in PACKED:
            check_encoding(Path(file))
    return _table("text", files, encoding_errors=mark_bytes())


def _first_character(place: Path) -> str:
    if place.suffix in PACKED:
        return ""
    with place.open(encoding="utf-8-sig", errors="replace") as file:
        return next((line.lstrip()[0] for line in file if line.strip()), "")


def _document(path: str, place: Path) -> ListRows:
    check_encoding(place)
    try:
        listed = json.loads(text := place.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise DataError(f"--data.path {path} is not UTF-8: there is a byte {byte:#x} in line {line}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--data.path {path} is no JSON: {error}") from error
    if not listed:
        raise DataError(f"--data.path {path}: the list in it is empty")
    return ListRows(path, place.parent, listed, text if SURROGATE.search(text) else "")


def _folder(path: str, place: Path, split: str) -> Rows:
    """What `save_to_disk` wrote, or a folder of data files, whose names say the split as on the hub."""
    import datasets

    if (place / "dataset_dict.json").is_file():
        found = datasets.load_from_disk(str(place))
        if split not in found:
            raise DataError(f"--data.path {path} has no split {split!r}. It has: {', '.join(found)}.")
        return TableRows(path, place, found[split])
    if (place / "state.json").is_file():
        return TableRows(path, place, datasets.load_from_disk(str(place)))
    files = _split_files(place, split)
    if not files:
        return TableRows(path, place, datasets.load_dataset(str(place), split=split))
    kinds = {"lines" if _holds_lines(file) else str(file_kind(file)) for file in files}
    if len(kinds) > 1:
        names = ", ".join(sorted({file.suffix for file in files}))
        raise DataError(f"--data.path {path} has files of several kinds ({names}): give those of one kind.")
    (kind,) = kinds
    if kind == "lines":
        return LineRows(path, place, _lines([str(file) for file in files]))
    if kind == "csv":
        return _cells(path, place, files)
    if kind == "json":
        documents = [_document(str(file), file) for file in files]
        return ListRows(
            path, place, [row for one in documents for row in one.listed], "".join(d.escapes for d in documents)
        )
    return TableRows(path, place, _table(kind, [str(file) for file in files]))


def _holds_lines(file: Path) -> bool:
    kind = file_kind(file)
    return kind == "lines" or (kind == "json" and _first_character(file) != "[")


def _split_files(place: Path, split: str) -> list[Path]:
    """The files of a split that hold rows; empty where `datasets` finds none by their names, and where they only describe
    pictures beside them.
    """
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base = glob.escape(str(place))
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        return []
    files = [Path(str(file)) for file in found.get(split, [])]
    rows = [file for file in files if file_kind(file) is not None]
    return [] if len(rows) < len(files) and any(file.stem == "metadata" for file in rows) else rows


def _hub(path: str, split: str) -> Rows:
    """A dataset of the hub, or a copy of one whose card says which files it has. Lines of JSON are read as those of a file
    are, so that rows keep their types; the rest as `datasets` has it.
    """
    import datasets

    hub_id, _, part = path.partition("@")
    copy = Path(hub_id).expanduser()
    if copy.is_dir():
        hub_id = str(copy)
    elif Path(path).is_absolute() or path.startswith((".", "~")) or hub_id.count("/") > 1:
        raise DataError(f"--data.path {path}: there is no such file or folder")
    which: dict[str, Any] = {}
    if part:
        which = {"name" if part in datasets.get_dataset_config_names(hub_id) else "data_dir": part}
    folder = copy if copy.is_dir() else Path(".")
    parts = datasets.load_dataset_builder(hub_id, **which).config.data_files or {}
    files = [str(file) for file in parts.get(split, [])]
    if files and all(file_kind(Path(file)) == "lines" for file in files):
        return LineRows(path, folder, _table("text", files, encoding_errors=mark_bytes()))
    return TableRows(path, folder, datasets.load_dataset(hub_id, split=split, **which))


def _has_configurations(place: Path) -> bool:
    """Whether the card of a dataset, its README.md, says which files it has."""
    card = place / "README.md"
    _, *rest = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2) if card.is_file() else [""]
    if len(rest) < 2:
        return False
    try:
        described = yaml.safe_load(rest[0])
    except yaml.YAMLError:
        return False
    return isinstance(described, dict) and bool(described.get("configs"))


def _at_once(table: Any) -> int:
    """Of rows that are large on average fewer."""
    stored = table.data
    return max(1, min(BATCH, BATCH_BYTES * stored.num_rows // max(1, stored.nbytes)))


def _undecoded(table: Any) -> Any:
    """The table with pictures, and whatever else could be decoded, as they are stored: pictures are decoded when a task is
    made, as those of other files are, and the rest is nobody's.
    """
    closed = {name: _closed(feature) for name, feature in table.features.items()}
    for name, feature in closed.items():
        if feature != table.features[name]:
            table = table.cast_column(name, feature)
    return table


def _closed(feature: Any) -> Any:
    """A feature of `datasets` that decodes nothing but JSON."""
    import datasets

    if isinstance(feature, dict):
        return {name: _closed(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_closed(feature.feature))
    decodes = getattr(feature, "decode", False) and not isinstance(feature, datasets.Json)
    return replace(feature, decode=False) if decodes else feature
