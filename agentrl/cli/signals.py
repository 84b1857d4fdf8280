"""SIGINT and SIGTERM end a command in order, whatever it is doing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does. Entered after `ray.init`, which has a handler of its own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def cancelled_at_once() -> Iterator[None]:
    """In a task under `until_signal` that holds up the event loop: the signals raise CancelledError right where it is. (vLLM
    swallows a KeyboardInterrupt while it starts, and waits for ever.) While it awaits, `until_signal` cancels it.
    """
    task = asyncio.current_task()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if asyncio.current_task() is task:
            raise asyncio.CancelledError

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def until_signal(work: Coroutine[Any, Any, None]) -> bool:
    """Await the work; True when SIGINT or SIGTERM cancelled it and it has ended."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
    return False
