"""All engines of a run at a weight update: every one paused, updated and resumed, or the run stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..engine import Engine


class EngineFleet:
    """Engines that always serve one version. `publish` leaves no engine paused, whatever fails."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    async def publish(self, source: Any, version: int) -> None:
        """New weights on every engine. Running requests are kept and go on with them."""
        await asyncio.gather(*(engine.pause("keep") for engine in self.engines))
        try:
            await asyncio.gather(*(engine.update_weights(source, version) for engine in self.engines))
        finally:
            await asyncio.gather(*(engine.resume() for engine in self.engines))
