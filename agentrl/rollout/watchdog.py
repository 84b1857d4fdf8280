"""No wait without a bound: what is awaited for long is named, what is awaited for too long fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import InfrastructureError

log = logging.getLogger(__name__)
T = TypeVar("T")
CLEAN_UP_S = 10.0


class Digest:
    """Logs warnings that come in crowds: one at once, and how many more there were with the next, `every_s` seconds later at
    the earliest.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._quiet_until = -math.inf
        self._more = 0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            self._more += 1
            return
        more = f"; since the last such line {self._more} more" if self._more else ""
        log.warning("%s%s", text, more)
        self._quiet_until, self._more = now + self._every_s, 0


async def within(
    awaitable: Awaitable[T],
    what: str | Callable[[], str],
    *,
    warn_after: float,
    fail_after: float,
    warn: Callable[[str], None] = log.warning,
) -> T:
    """Await; give `warn` a line that names `what` after `warn_after` seconds, half of `fail_after` at the latest;
    InfrastructureError after `fail_after`.

    What is given up, here or by a caller that is cancelled, is cancelled too and has CLEAN_UP_S to come to its end.
    """
    task = asyncio.ensure_future(awaitable)
    named = what if callable(what) else lambda: what
    quiet = min(warn_after, fail_after / 2)
    try:
        done, _ = await asyncio.wait([task], timeout=quiet)
        if not done:
            warn(f"waiting for {quiet:.0f} s for {named()}")
            done, _ = await asyncio.wait([task], timeout=fail_after - quiet)
        if not done:
            raise InfrastructureError(f"waited {fail_after:g} s for {named()}")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CLEAN_UP_S)
            if task.done() and not task.cancelled():
                task.exception()  # of what was given up nobody else asks how it ended
