"""How many episodes fail, what is said of it, and when that is too many to go on."""

from __future__ import annotations

import logging
import re
from typing import Any

from ..config import RolloutSection
from ..errors import RunStoppedError
from .episode import EpisodeOrder, EpisodeResult

LEAST = 8
ROUNDS = 10
"""Where every episode may fail, a run stops without a good one among so many times those that may be in flight."""
NO_VERDICT = "has no verdict: it was given no reward, or its last reward was None or no finite number"
log = logging.getLogger(__name__)


class ErrorRate:
    """Counts the episodes that ended since the last batch. At least LEAST of them, and a group's worth, are judged. At most
    `places` groups are in flight.

    Of each cause the log shows the first since the last batch; a worker that dies takes a hundred episodes with it.
    """

    def __init__(self, rollout: RolloutSection, places: int) -> None:
        self._rollout = rollout
        self._hopeless = max(LEAST, ROUNDS * places * rollout.n_samples)
        self._last = "unknown"
        self.reset()

    def reset(self) -> None:
        """A batch was taken."""
        self._ended = self._failed = 0
        self._said: set[str] = set()

    def note(self, order: EpisodeOrder, result: EpisodeResult) -> None:
        """An episode has come out. One without a verdict trains nothing, as if it had failed."""
        self._ended += 1
        if result.has_verdict:
            return
        self._failed += 1
        what = (result.env or "env unknown", order.task.id, order.rollout_id)
        if result.error is None:
            self._last = f"{order.rollout_id}, which {NO_VERDICT}"
            log.log(self._level(NO_VERDICT), "%s, task %s: episode %s %s", *what, NO_VERDICT)
            return
        self._last = cause = _cause(result.error)
        log.log(self._level(cause), "%s, task %s: episode %s failed: %s", *what, result.error["traceback"])

    def lost(self, order: EpisodeOrder, attempt: int, error: dict[str, Any]) -> None:
        """An attempt that infrastructure lost; another one follows."""
        what = (order.rollout_id, attempt, error["class"], error["message"])
        log.log(self._level(_cause(error)), "episode %s: attempt %d lost, played again: %s: %s", *what)

    def _level(self, cause: str) -> int:
        alike = re.sub(r"\d+", "#", cause)[:200]
        first = alike not in self._said
        self._said.add(alike)
        return logging.WARNING if first else logging.INFO

    def check(self, playing: int) -> None:
        """Raises RunStoppedError when more than rollout.max_error_rate of the episodes failed or have no verdict, or where that
        allows everything, when none came out well in ROUNDS. The `playing` ones count as good: what fails does so
        sooner than what goes well, and those that end first are no fair sample.
        """
        enough = max(LEAST, self._rollout.n_samples)
        most = self._rollout.max_error_rate
        if self._ended >= enough and self._failed > most * (self._ended + playing):
            why = f"more than rollout.max_error_rate = {most:g} allows"
        elif most == 1 and self._failed == self._ended >= self._hopeless:
            why = "and none came out well"
        else:
            return
        raise RunStoppedError(
            f"{self._failed} of the last {self._ended} episodes failed or have no verdict, {why}. The last one: {self._last}"
        )


def _cause(error: dict[str, Any]) -> str:
    return f"{error['class']}: {error['message']}"
