"""Where episodes are played, as everyone who orders them sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
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
    return await repeated(partial(play_once, player), order, retries)


async def repeated(
    attempt: Callable[[EpisodeOrder], Awaitable[EpisodeResult]], order: EpisodeOrder, retries: int
) -> EpisodeResult:
    """The last of up to `retries + 1` attempts."""
    for _ in range(retries):
        result = await attempt(order)
        if not result.retryable:
            return result
    return await attempt(order)
