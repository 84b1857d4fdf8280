"""Texts to pretrain on, cut into pieces: how many there are is known before the first update, and memory holds none of them."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..disk import writing


class Pieces:
    """Which row piece p is of, which of the row's pieces, and its tokens, 4 bytes each in a file without a name; a piece that is
    a whole row may be without them.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="agentrl-")  # noqa: SIM115, it lives as long as the pieces
        self._rows, self._places, self._ends = array("q"), array("i"), array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, pieces: Sequence[NDArray[np.int32]]) -> None:
        """The next row's pieces. Raises InfrastructureError when the disk is full."""
        for place, ids in enumerate(pieces):
            self._rows.append(row)
            self._places.append(place)
            self._ends.append(self._end(len(self) - 1) + len(ids))
            with writing(Path(tempfile.gettempdir())):
                self._file.write(ids.tobytes())

    def __getitem__(self, piece: int) -> tuple[int, int, NDArray[np.int32]]:
        """(row, place in the row, its tokens; none where they are not kept). Once this was asked nothing may be added."""
        start, end = self._end(piece), self._ends[piece]
        ids = self._tokens[start:end] if end > start else np.zeros(0, np.int32)
        return self._rows[piece], self._places[piece], np.array(ids)

    def _end(self, before: int) -> int:
        """Tokens of the pieces before one."""
        return self._ends[before - 1] if before else 0

    @cached_property
    def _tokens(self) -> NDArray[np.int32]:
        self._file.flush()
        return np.memmap(self._file, np.int32, "r")
