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


async def play_repeatedly(player: Player, order: EpisodeOrder, retries: int) -> EpisodeResult:
    """What infrastructure failed is repeated from reset with the same seeds, at most `retries` times; all else is final."""
    for _ in range(retries):
        result = await play_once(player, order)
        if not result.retryable:
            return result
    return await play_once(player, order)
