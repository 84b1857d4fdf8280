"""Weights that the trainer sends while the engines receive: who stands in which group, and what every engine is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .weights import WeightSource

Send = Callable[[WeightSource], Awaitable[None]]


class Broadcast:
    """The trainer has rank 0 of a group, the workers of the engines the ranks after it, engine by engine.

    A group serves every update until its engines change or one of them failed: then the next update makes another, at the
    address that its source offers. `send(part)` is the trainer's side, and runs while the engines load.
    """

    def __init__(self, send: Send, workers: int) -> None:
        self.send = send
        self._workers = workers
        self._members: list[Any] = []
        self._rendezvous: dict[str, Any] = {}

    def parts(self, source: WeightSource, engines: Sequence[Any]) -> list[WeightSource]:
        """The source as each engine is told it, in their order; the first is the trainer's as well."""
        same = len(engines) == len(self._members) and all(map(lambda a, b: a is b, engines, self._members))
        if not same:
            world = 1 + self._workers * len(engines)
            self._rendezvous = {**source.fetch, "world_size": world}
        self._members = list(engines)
        offsets = range(1, 1 + self._workers * len(engines), self._workers)
        return [source.with_fetch(**self._rendezvous, rank_offset=offset) for offset in offsets]

    def forget(self) -> None:
        """The group is of no more use: somebody in it failed."""
        self._members = []
