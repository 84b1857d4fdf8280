"""Where the time of a step went."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from ..rollout.episode import EpisodeResult
from .metrics import Metrics


class StepClock:
    """Laps of one step. `finish` gives time/… in seconds, throughput/… per second of the step, memory/… in bytes.

    time/bubble is the part of a step in which the trainer waited for rollouts.
    """

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps: Metrics = {}
        self._process = psutil.Process()

    def start(self) -> None:
        self._began = self._last = time.monotonic()
        self._laps = {}

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.monotonic()
        self._laps[f"time/{name}"] = now - self._last
        self._last = now

    def finish(self, results: Sequence[EpisodeResult]) -> Metrics:
        whole = max(time.monotonic() - self._began, 1e-9)
        tokens = sum(result.sampled_tokens for result in results)
        return {
            "time": time.time(),
            **self._laps,
            "time/step": whole,
            "time/bubble": self._laps.get("time/rollout_wait", 0.0) / whole,
            "throughput/tokens": tokens / whole,
            "throughput/episodes": len(results) / whole,
            "memory/rss": float(self._process.memory_info().rss),
        }
