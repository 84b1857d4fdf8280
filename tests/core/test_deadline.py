"""A deadline does what asyncio.timeout does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.deadline import Deadline

Bounded = Callable[[Awaitable[None], float], Awaitable[str]]


async def by_deadline(call: Awaitable[None], bound_s: float) -> str:
    deadline, late = Deadline(bound_s), False
    try:
        try:
            await call
        finally:
            late = deadline.end()
    except asyncio.CancelledError:
        if not late:
            raise
        return "late"
    return "done"


async def by_timeout(call: Awaitable[None], bound_s: float) -> str:
    try:
        async with asyncio.timeout(bound_s):
            await call
    except TimeoutError:
        return "late"
    return "done"


async def outcomes(bounded: Bounded, calls: list[tuple[float, float, float]]) -> list[str]:
    """Of calls (beginning, length, bound) at once, the odd ones under a second bound of 0.05 s."""

    async def one(index: int, beginning: float, length: float, bound: float) -> str:
        await asyncio.sleep(beginning)
        call = bounded(asyncio.sleep(length), bound)
        if index % 2 == 0:
            return await call
        try:
            async with asyncio.timeout(0.05):
                return await call
        except TimeoutError:
            return "late outside"

    return await asyncio.gather(*(one(i, *call) for i, call in enumerate(calls)))


class Hasty(asyncio.SelectorEventLoop):
    """Its clock stands still while there is work, then goes to the next timer: nothing depends on the machine's speed."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def hastily(bounded: Bounded, calls: list[tuple[float, float, float]]) -> list[str]:
    with asyncio.Runner(loop_factory=Hasty) as runner:
        return runner.run(outcomes(bounded, calls))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.003, 0.007]),
            st.sampled_from([0.0, 0.2]),
            st.sampled_from([0.02, 0.1, 0.4, math.inf]),
        ),
        max_size=12,
    )
)
def test_calls_at_once_end_as_under_a_timeout_each(calls: list[tuple[float, float, float]]) -> None:
    assert hastily(by_deadline, calls) == hastily(by_timeout, calls)


async def test_a_call_that_ends_in_spite_of_its_deadline_leaves_no_cancellation() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0)

    task = asyncio.current_task()
    assert task is not None
    assert await by_deadline(stubborn(), 0.01) == "done"
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_who_is_cancelled_from_outside_as_well_is_not_late() -> None:
    task = asyncio.ensure_future(by_deadline(asyncio.sleep(10), 0.05))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
