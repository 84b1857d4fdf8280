"""What supervised training learns from: rows with their trained tokens marked, alone or in pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..image_store import ImageStore
from ..trajectory import Row
from .spelling import Spelling

if TYPE_CHECKING:
    from .references import References


@dataclass
class Pair:
    """A better and a worse answer. `reference` = the reference's summed log-probabilities of the two, once they are known."""

    chosen: Row
    rejected: Row
    margin: float = 0.0
    reference: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def rows(self) -> tuple[Row, Row]:
        return self.chosen, self.rejected


Item = Row | Pair


def rows_of(items: Sequence[Item]) -> list[Row]:
    """The rows of items, the chosen one of a pair before the rejected one."""
    return [row for item in items for row in (item.rows if isinstance(item, Pair) else (item,))]


@dataclass
class Examples:
    """Items in the order of the data; `left_out` counts rows of the data by the reason why they are not among them, `cut`
    those of which the end is missing, `respelled` recorded episodes of which the tokens are another model's. `references`
    are those of pairs, once they are known.
    """

    items: list[Item] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    respelled: int = 0
    references: References | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.items))

    def batch(self, indices: Sequence[int]) -> list[Item]:
        """The examples of these numbers, below the length; of rows that are none, none. Pairs with what the reference says,
        where that is known. Raises DataError for a row that cannot be read, unless such rows are skipped.
        """
        numbered = [(i, item) for i in indices for item in self._of(i)]
        known = self.references
        return [item if known is None else known.give(i, item) for i, item in numbered]

    def _of(self, number: int) -> list[Item]:
        return [self.items[number]]

    def describe(self, what: str) -> str:
        """In one line for a person."""
        trained = sum(int(row.loss_mask.sum()) for row in rows_of(self.items))
        line = f"{len(self.items)} {what}: {self.tokens} tokens, {trained} of them trained"
        line += f"; {self.cut} cut to train.max_len" if self.cut else ""
        line += f"; {self.respelled} of another model, spelled anew" if self.respelled else ""
        return line + "".join(f"; {count} left out: {reason}" for reason, count in self.left_out.items())


@dataclass
class ExamplesOnDemand(Examples):
    """`count` rows of which `make(i)` makes row i an example when its turn comes; nothing is kept. `items` and what is counted
    are of the first rows, which were looked at. `unit` = what they are: rows, or pieces of them.
    """

    count: int = 0
    looked_at: int = 0
    unit: str = "rows"
    make: Callable[[int], list[Item]] = field(default=lambda i: [])

    def __len__(self) -> int:
        return self.count

    def _of(self, number: int) -> list[Item]:
        return self.make(number)

    def describe(self, what: str) -> str:
        first = Examples(self.items, self.left_out, self.cut).describe(what)
        return f"{self.count} {self.unit}, spelled as their turn comes; of the first {self.looked_at} rows: {first}"


def as_row(spelling: Spelling, name: str, store: ImageStore | None, *, last_only: bool = False) -> Row:
    """A row for the trainer; its pictures go into the store. last_only: of the trained tokens the last alone is marked."""
    mask = np.array(spelling.trained, np.bool_)
    if last_only:
        mask = np.arange(len(spelling)) == len(spelling) - 1
    if store is not None:
        for image in spelling.images:
            store.put(image)
    return Row(
        token_ids=np.array(spelling.token_ids, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(spelling), np.float32),
        versions=np.full(len(spelling), -1, np.int32),
        rewards=np.zeros(len(spelling), np.float32),
        images=list(spelling.slots),
        rollout_id=name,
    )
