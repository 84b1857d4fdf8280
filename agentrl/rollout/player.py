"""Where episodes are played, as everyone who orders them sees it."""

from __future__ import annotations

from typing import Protocol

from ..errors import InfrastructureError
from .episode import EpisodeOrder, EpisodeResult, failed


class Player(Protocol):
    """Plays episodes somewhere. Raises InfrastructureError when the place was lost."""

    async def play(self, order: EpisodeOrder) -> EpisodeResult: ...


async def play_once(player: Player, order: EpisodeOrder) -> EpisodeResult:
    """One attempt; an episode lost with its place is a failed one."""
    try:
        return await player.play(order)
    except InfrastructureError as error:
        return failed(order, error)
