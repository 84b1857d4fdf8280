"""How long to wait before another try."""

from __future__ import annotations

import random
from collections.abc import Iterator


def pauses(first_s: float = 0.05, longest_s: float = 5.0) -> Iterator[float]:
    """Seconds between tries, without an end: they double up to the longest, and differ from caller to caller."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, longest_s)
