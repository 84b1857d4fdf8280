"""What is awaited for long is named, also where that is a crowd."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agentrl.rollout.watchdog import Digest, within


async def test_a_crowd_is_a_line_and_a_number(caplog: pytest.LogCaptureFixture) -> None:
    late = Digest(0.2)
    caplog.set_level(logging.WARNING)

    async def wait(name: str) -> None:
        await within(asyncio.sleep(0.1), f"episode {name}", warn_after=0.01, fail_after=30, warn=late)

    await asyncio.gather(*(wait(f"a{i}") for i in range(50)))
    await asyncio.sleep(0.2)
    await wait("b")
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "waiting for 0 s for episode a0"
    assert second == "waiting for 0 s for episode b; since the last such line 49 more"
