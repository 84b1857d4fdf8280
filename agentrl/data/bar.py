"""Progress of looking at rows, on a terminal alone, and only where it takes long enough to be seen."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
SILENT_S = 2.0
EVERY_S = 0.2


def checking(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items; from SILENT_S on a bar shows how many have been taken."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    total = len(items) if total is None and isinstance(items, Sized) else total
    bar: Progress | None = None
    due = time.monotonic() + SILENT_S
    try:
        for done, item in enumerate(items):
            yield item
            if done % 64 == 0 and console.is_terminal and time.monotonic() > due:
                if bar is None:
                    bar = Progress(console=console, transient=True)
                    bar.start()
                    job = bar.add_task(f"checking {what}", total=total)
                bar.update(job, completed=done + 1)
                due = time.monotonic() + EVERY_S
    finally:
        if bar is not None:
            bar.stop()
