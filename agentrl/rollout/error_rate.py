"""How many episodes fail, and when that is too many to go on."""

from __future__ import annotations

import logging

from ..config import RolloutSection
from ..errors import RunStoppedError
from .episode import EpisodeOrder, EpisodeResult

LEAST = 8
log = logging.getLogger(__name__)


class ErrorRate:
    """Counts the episodes that ended since the last batch. At least LEAST of them, and a group's worth, are judged."""

    def __init__(self, rollout: RolloutSection) -> None:
        self._rollout = rollout
        self._last = "unknown"
        self.reset()

    def reset(self) -> None:
        """A batch was taken."""
        self._ended = self._failed = 0

    def note(self, order: EpisodeOrder, result: EpisodeResult) -> None:
        self._ended += 1
        if result.error is None:
            return
        self._failed += 1
        self._last = f"{result.error['class']}: {result.error['message']}"
        what = (result.env or "env unknown", order.task.id, order.rollout_id)
        log.warning("%s, task %s: episode %s failed: %s", *what, result.error["traceback"])

    def check(self) -> None:
        """Raises RunStoppedError when more than rollout.max_error_rate of the episodes failed."""
        enough = max(LEAST, self._rollout.n_samples)
        if self._ended >= enough and self._failed > self._rollout.max_error_rate * self._ended:
            raise RunStoppedError(
                f"{self._failed} of the last {self._ended} episodes failed, more than rollout.max_error_rate = "
                f"{self._rollout.max_error_rate:g} allows. The last one: {self._last}"
            )
