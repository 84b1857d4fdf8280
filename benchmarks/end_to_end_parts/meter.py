"""What a program and all that it starts take of the processors, at any moment of its life."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

INTERVAL_S = 0.5


class Meter:
    """Runs a command and reads its process tree every INTERVAL_S. A process that is gone keeps the seconds it was last seen
    with, and one whose parent is gone stays in the tree.
    """

    def __init__(self) -> None:
        self._known: dict[psutil.Process, float] = {}
        self._curve: list[tuple[float, float]] = []

    def run(self, command: Sequence[str], **options: Any) -> None:
        """Raises CalledProcessError when the command fails."""
        done = threading.Event()
        self._curve.append((time.time(), 0.0))
        with subprocess.Popen(command, **options) as process:
            root = psutil.Process(process.pid)
            watcher = threading.Thread(target=self._watch, args=(root, done))
            watcher.start()
            try:
                code = process.wait()
            finally:
                done.set()
                watcher.join()
        if code:
            raise subprocess.CalledProcessError(code, command)

    def _watch(self, root: psutil.Process, done: threading.Event) -> None:
        self._known[root] = 0.0
        while not done.wait(INTERVAL_S):
            with contextlib.suppress(psutil.Error):  # it has ended
                self._known |= dict.fromkeys(set(root.children(recursive=True)) - self._known.keys(), 0.0)
            for process in self._known:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._known[process] = times.user + times.system
            self._curve.append((time.time(), sum(self._known.values())))

    def cpu_seconds(self, began: float, ended: float) -> float:
        """Processor seconds between two moments, in seconds since the epoch."""
        moments, seconds = zip(*self._curve, strict=True)
        return float(np.diff(np.interp([began, ended], moments, seconds))[0])
