"""How long to wait before another try."""

from __future__ import annotations

import random
from collections.abc import Iterator

MOST_AFTER_S = 60.0
"""Longest that a server's Retry-After is heeded."""


def pauses(first_s: float = 0.05, longest_s: float = 5.0) -> Iterator[float]:
    """Seconds between tries, without an end: they double up to the longest, and differ from caller to caller."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, longest_s)


def retry_after(header: str) -> float:
    """A Retry-After in seconds; a date is not heeded."""
    return min(float(header), MOST_AFTER_S) if header.isascii() and header.isdigit() else 0.0
