"""Where the time of a step went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psutil

from ..rollout.episode import EpisodeResult
from .metrics import Metrics


class StepClock:
    """Laps of one step. `finish` gives time/… in seconds, throughput/… per second of the step, memory/… in bytes.

    time/bubble is the share of a step, 0..1, in which the trainer waited for rollouts.
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
            "memory/rss": self._resident(),
        }

    def _resident(self) -> float:
        """Bytes of this process and of those it started, Ray's local ones among them."""
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                total += process.memory_info().rss
        return float(total)
