"""The terminal of the command line: answers go to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

ProgressMode = Literal["auto", "plain", "none"]
ProgressCallback = Callable[[str, float], None]

PLAIN_SHARE = 0.25


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(mode: ProgressMode = "auto") -> Iterator[ProgressCallback]:
    """A callback `(what, share done from 0 to 1)`. auto: a bar on a terminal, elsewhere a line a quarter; none: silent."""
    if mode == "none":
        yield lambda what, share: None
    elif mode == "plain" or not err.is_terminal:
        yield _PlainBar()
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)


class _PlainBar:
    """A line when the work under way changes, and one for each further quarter of it."""

    def __init__(self) -> None:
        self._what = ""
        self._quarter = -1

    def __call__(self, what: str, share: float) -> None:
        quarter = int(share / PLAIN_SHARE)
        if what == self._what and quarter <= self._quarter:
            return
        self._what, self._quarter = what, quarter
        err.print(f"{what}: {share:.0%}", markup=False)
