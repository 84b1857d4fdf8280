"""Which of an executor's episodes a call of `llm_engine` is for.

One executor plays many episodes at once, and may keep the first `llm_engine` that it was given, in a server of its own that
answers them all. Calls then come through the engine of another episode, also of one that has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import AgentError

if TYPE_CHECKING:
    from .engine import Call, EpisodeEngine

_played: ContextVar[Any] = ContextVar("played", default=None)
"""The engine of the episode whose code runs; tasks and threads that it starts inherit it."""


@dataclass
class Left:
    """The calls of an episode that has ended which it did not train, those still under way too. `for_whom` = the episodes, by
    the id of their engine, that were open then: one of them may have made them.
    """

    calls: list[Call]
    for_whom: set[int]


@dataclass
class Episodes:
    """The episodes of one executor that are being played, and what those that ended have left. Any thread may ask."""

    open: list[EpisodeEngine] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def playing(self, engine: EpisodeEngine) -> Iterator[None]:
        """While the episode of this engine is open. What it leaves is kept as long as one is that may claim it."""
        with self._lock:
            self.open.append(engine)
        try:
            yield
        finally:
            with self._lock:
                self.open = [one for one in self.open if one is not engine]
                engine.calls[:] = [call for call in engine.calls if not any(call is one for one in engine.trained)]
                if engine.calls or engine.asked:
                    self.left.append(Left(engine.calls, {id(one) for one in self.open}))
                for left in self.left:
                    left.for_whom.discard(id(engine))
                self.left = [left for left in self.left if left.for_whom]

    @contextlib.contextmanager
    def running(self, engine: EpisodeEngine) -> Iterator[None]:
        """While code of this episode runs, in this task and those that it starts."""
        token = _played.set(engine)
        try:
            yield
        finally:
            _played.reset(token)

    @contextlib.contextmanager
    def asking(self, prompt: Sequence[int]) -> Iterator[EpisodeEngine]:
        """While a call is open: the engine that it is for. That of the open episode whose code asks; where it is nobody's,
        of the one a context of which goes on in this prompt, else of the one that has asked least. Raises AgentError when no
        episode is open.
        """
        with self._lock:
            engine = self._owner(prompt)
            engine.asked += 1
        try:
            yield engine
        finally:
            with self._lock:
                engine.asked -= 1

    def _owner(self, prompt: Sequence[int]) -> EpisodeEngine:
        asking = _played.get()
        if any(engine is asking for engine in self.open):
            found: EpisodeEngine = asking
            return found
        if not self.open:
            raise AgentError("llm_engine was asked when no episode of its executor was being played")
        return min(self.open, key=lambda engine: (-engine.continued(prompt), len(engine.calls) + engine.asked))

    def claim(self, context: tuple[int, ...], ids: tuple[int, ...], by: EpisodeEngine) -> Call | None:
        """A call made for another episode that sampled these ids in this context; from now on it is `by`'s."""
        others = [engine.calls for engine in self.open if engine is not by]
        for calls in (*(left.calls for left in self.left), *others):
            for call in calls:
                if call.prompt == context and call.generation.token_ids[: len(ids)] == ids:
                    calls[:] = [one for one in calls if one is not call]
                    by.calls.append(call)
                    return call
        return None
