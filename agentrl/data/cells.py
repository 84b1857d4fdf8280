"""Tables of cells in text: csv and tsv."""

from __future__ import annotations

import csv
import glob
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from .lines import check_encoding


def read_cells(place: Path) -> tuple[Any, dict[int, str]]:
    """(a table of `datasets`, what is wrong with which of its rows).

    Every cell is a string: what a csv file holds has no type, and guessing turns 007 into 7 and NA into nothing. Rows may
    end in empty cells that the header lacks; any other cell too many makes a bad row, as do bytes that are no UTF-8.
    """
    import datasets

    check_encoding(place)
    separator = "\t" if ".tsv" in place.suffixes else ","
    with place.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        records = _records(file, separator)
        names = next(records, [])
        while names and not names[-1].strip():
            names.pop()
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"--data.path {place}: two of its columns are called {twice[0]!r}")
        bad, number = dict[int, str](), -1
        for number, cells in enumerate(records):
            if what := _wrong(cells, len(names)):
                bad[number] = what
    if number < 0:
        raise DataError(f"--data.path {place}: there are no rows below its header")
    table = datasets.load_dataset(
        "csv",
        data_files=glob.escape(str(place)),
        split="train",
        keep_default_na=False,
        sep=separator,
        names=names,
        header=0,
        usecols=list(range(len(names))),
        index_col=False,
        encoding_errors="replace",
        features=datasets.Features({name: datasets.Value("string") for name in names}),
    )
    return table, bad


def _records(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    """The cells of every line that is not blank: those that pandas makes a row of."""
    csv.field_size_limit(sys.maxsize)
    for cells in csv.reader(lines, delimiter=separator):
        if cells and not (len(cells) == 1 and cells[0].isspace()):
            yield cells


def _wrong(cells: list[str], columns: int) -> str:
    if any(cells[columns:]):
        return f"it has {len(cells)} cells, and the header names {columns} columns"
    text = "".join(cells)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: there is a byte {ord(text[error.start]) - 0xDC00:#x} in it"
    return ""
