"""Which rollout workers are replaced, over actors that answer or not as a test says."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl import InfrastructureError, Limits
from agentrl.config import Config
from agentrl.rollout import pool as pools
from agentrl.rollout.pool import WorkerPool


class Method:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def remote(self, *given: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        if self.answer is not None:
            future.set_result(self.answer)
        return future


class Actor:
    """Stands where a worker's actor does. `deaf` = it answers nothing."""

    def __init__(self) -> None:
        self.killed = False
        self.answers()

    def answers(self, deaf: bool = False) -> None:
        self.stages = Method(None if deaf else {"000001-0": "in the environment"})
        self.play = Method(None)
        self.ready = Method("yes")


class Clock:
    """Two seconds go by between two looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.found: pools.Silence = {}

    def monotonic(self) -> float:
        return self.now

    async def look(self, pool: WorkerPool) -> dict[str, str]:
        self.now += 2
        self.found = await pool._look(self.found)
        return await pool.stages()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pools, "time", clock)
    return clock


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    import ray

    monkeypatch.setattr(WorkerPool, "_spawn", lambda self, index: Actor())
    monkeypatch.setattr(ray, "kill", lambda actor: setattr(actor, "killed", True))
    monkeypatch.setattr(ray, "cancel", lambda reference: reference.cancel())
    monkeypatch.setattr(pools, "STAGES_S", 0.02)
    monkeypatch.setattr(pools, "sent", lambda method, what, order: method(order))
    times = {"rollout": {"silence_timeout_s": 5}, "watchdog": {"warn_after": 0.01, "fail_after": 0.02}}
    spec: Any = SimpleNamespace(config=Config.model_validate(times), engines=())
    return WorkerPool(spec, 2)


async def test_a_worker_that_says_nothing_for_too_long_is_replaced_once(pool: WorkerPool, clock: Clock) -> None:
    lost, other = pool._workers
    lost.answers(deaf=True)
    for _ in range(3):
        assert await clock.look(pool) == {"000001-0": "in the environment"}
    assert not lost.killed
    for _ in range(20):
        await clock.look(pool)
    assert (lost.killed, other.killed, pool._workers[1], pool.replaced) == (True, False, other, 1)


async def test_a_worker_that_is_late_now_and_then_stays(pool: WorkerPool, clock: Clock) -> None:
    late, _ = pool._workers
    for turn in range(30):
        late.answers(deaf=turn % 3 != 0)
        await clock.look(pool)
    assert (pool.replaced, late.killed) == (0, False)


async def test_silence_counts_from_the_first_question(pool: WorkerPool, clock: Clock) -> None:
    """A driver that was held up itself has heard nothing either."""
    await clock.look(pool)
    clock.now += 1000
    pool._workers[0].answers(deaf=True)
    await clock.look(pool)
    assert pool.replaced == 0


async def test_the_watch_looks_again_and_again(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(pools, "WATCH_S", 0.0)
    pool._workers[0].answers(deaf=True)
    watching = asyncio.create_task(pool.watch())
    async with asyncio.timeout(20):
        while not pool.replaced:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    watching.cancel()


async def test_a_worker_that_owes_an_episode_past_every_bound_is_replaced(pool: WorkerPool) -> None:
    order: Any = SimpleNamespace(
        rollout_id="000001-0", group_id="000001", limits=Limits(episode_timeout_s=0.05, call_timeout_s=0.01)
    )
    with pytest.raises(InfrastructureError, match="episode 000001-0 of group 000001"):
        await pool.play(order)
    assert pool.replaced == 1
