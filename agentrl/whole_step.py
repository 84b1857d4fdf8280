"""A step of training is made whole or is known not to be: what a checkpoint may be taken of."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

INTERRUPT_GRACE_S = 8.0


class WholeStep:
    """Runs one step at a time. `half_done` = the last one began and has not come to a good end."""

    def __init__(self) -> None:
        self._step: asyncio.Future[None] | None = None

    async def run(self, step: Coroutine[Any, Any, None]) -> None:
        """A step once begun is finished, unless it takes longer than INTERRUPT_GRACE_S after an interrupt."""
        self._step = asyncio.ensure_future(step)
        try:
            await asyncio.shield(self._step)
        except asyncio.CancelledError:
            await asyncio.wait([self._step], timeout=INTERRUPT_GRACE_S)
            self._step.cancel()
            raise

    @property
    def half_done(self) -> bool:
        step = self._step
        return step is not None and (not step.done() or step.cancelled() or step.exception() is not None)
