"""The worker pool on workers that are no processes: losses, silence, cancellation."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
import ray

from agentrl import InfrastructureError, Limits, Sampling, Task
from agentrl.config import Config
from agentrl.errors import StoreFullError
from agentrl.rollout.episode import EpisodeOrder
from agentrl.rollout.pool import WorkerPool
from agentrl.rollout.worker import WorkerSpec

ORDER = EpisodeOrder("r", "g", 0, 0, Task("t"), 0, 0, Sampling(), Limits(call_timeout_s=0.01, episode_timeout_s=0.01))


class Silent:
    """A worker whose episodes end only when they are cancelled."""

    def __init__(self) -> None:
        self.play = self.ready = self
        self.calls: list[asyncio.Future[Any]] = []

    def remote(self, order: EpisodeOrder | None = None) -> asyncio.Future[Any]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


class Pool(WorkerPool):
    def _spawn(self, index: int) -> Any:
        return Silent()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(ray, "cancel", lambda call: asyncio.get_running_loop().call_later(0.01, call.set_result, None))
    return ended


def make_pool() -> Pool:
    config = Config.model_validate({"watchdog": {"warn_after": 0.05}})
    return Pool(WorkerSpec(config, "", "", ()), 1)


async def test_a_worker_that_does_not_answer_is_replaced(killed: list[Any]) -> None:
    pool = make_pool()
    deaf = pool._workers[0]
    with pytest.raises(InfrastructureError, match="episode r of group g"):
        await pool.play(ORDER)
    assert killed == [deaf] and pool.replaced == 1 and pool._workers[0] is not deaf


def failed(error: Exception) -> asyncio.Future[Any]:
    """An answer that never comes, and why."""
    answer = asyncio.get_running_loop().create_future()
    answer.set_exception(error)
    return answer


async def test_a_worker_that_does_not_start_says_why(killed: list[Any]) -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    pool, why = make_pool(), "agentrl.errors.InfrastructureError: env server http://h:1: no answer to envs in 45 s"
    trace = f"ray::RolloutWorker.__init__()\n  File x\n{why}"
    failure = ActorDiedError(RayTaskError("__init__", trace, InfrastructureError(""), pid=1, ip="", proctitle=""))

    pool._workers[0].remote = lambda order: failed(failure)
    with pytest.raises(InfrastructureError, match=f"rollout worker 0 died: {why}$"):
        await pool.play(ORDER)
    assert pool.replaced == 1


async def test_a_full_object_store_is_no_fault_of_the_worker(killed: list[Any]) -> None:
    """On the way to the worker and on the way back; the cause is named and the episode may be played again."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

    pool = make_pool()
    full = RayTaskError("play", "as text", OutOfDiskError("disk"), pid=1, ip="", proctitle="").as_instanceof_cause()
    for raised, what in ((ObjectStoreFullError("store"), "a task"), (full, "an episode's result")):

        def remote(order: Any, raised: Exception = raised) -> Any:
            if raised is not full:
                raise raised
            return failed(raised)

        pool._workers[0].remote = remote
        with pytest.raises(StoreFullError, match=f"no room for {what}: Ray's object store .*--rollout.max-episodes"):
            await pool.play(ORDER)
    assert not killed and pool.replaced == 0 and StoreFullError.retryable


async def test_a_cancelled_episode_may_close_its_environment_first(killed: list[Any]) -> None:
    pool = make_pool()
    playing = asyncio.ensure_future(pool.play(ORDER))
    await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert pool._workers[0].calls[0].done() and not killed


async def test_a_closed_pool_replaces_nobody(killed: list[Any]) -> None:
    pool = make_pool()
    playing = asyncio.ensure_future(pool.play(ORDER))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(InfrastructureError):
        await playing
    assert len(killed) == 1 and pool.replaced == 0


async def test_the_start_of_a_new_worker_is_not_the_time_of_an_episode(killed: list[Any]) -> None:
    """It may take longer than an episode is allowed to."""
    pool = make_pool()
    with pytest.raises(InfrastructureError):
        await pool.play(ORDER)
    playing = asyncio.ensure_future(pool.play(ORDER))
    await asyncio.sleep(0.2)
    assert pool.replaced == 1 and not playing.done()
    started = pool._workers[0].calls[0]
    started.set_result(True)
    with pytest.raises(InfrastructureError, match="episode r of group g"):
        await playing
    assert pool.replaced == 2


async def test_an_answer_that_ray_has_no_room_for_is_the_infrastructures_failure(killed: list[Any]) -> None:
    """So the episode is played again; the worker lives."""
    pool = make_pool()
    playing = asyncio.ensure_future(pool.play(replace(ORDER, limits=Limits())))
    await asyncio.sleep(0.01)
    pool._workers[0].calls[0].set_exception(ray.exceptions.ObjectStoreFullError("it is full"))
    with pytest.raises(InfrastructureError, match=r"rollout worker 0: ObjectStoreFullError: .*it is full"):
        await playing
    assert not killed and pool.replaced == 0


async def test_an_ending_start_says_nothing_of_what_broke_with_it(killed: list[Any]) -> None:
    """Interrupted while workers start: their processes end, and with them the calls that waited for them."""
    pool = make_pool()
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
    starting = asyncio.ensure_future(pool.ready())
    await asyncio.sleep(0.01)
    call = pool._workers[0].calls[0]
    loop.call_later(0.01, lambda: call.done() or call.set_exception(ray.exceptions.RayActorError()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del starting
    gc.collect()
    await asyncio.sleep(0)
    assert not said
