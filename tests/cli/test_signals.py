"""A signal while a command starts its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from agentrl.cli.playing import run_until_signal
from agentrl.cli.signals import cancelled_at_once


async def blocked() -> None:
    time.sleep(30)  # noqa: ASYNC251


async def waiting() -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("start", [blocked, waiting])
def test_it_ends_the_start_and_cleans_up(start: Any, number: signal.Signals) -> None:
    """Whether the start holds up the event loop or awaits."""
    cleaned_up = []

    async def work() -> None:
        try:
            with cancelled_at_once():
                threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
                await start()
        finally:
            cleaned_up.append(start)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_until_signal(work())
    assert cleaned_up == [start] and signal.getsignal(number) == before
