"""The rollout workers of a run, as one player: the least loaded takes the next episode."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from ..errors import AgentRLError, InfrastructureError, StoreFullError
from ..object_store import no_room, sent
from .episode import EpisodeOrder, EpisodeResult
from .watchdog import Digest, within
from .worker import RolloutWorker, WorkerSpec

MAX_CONCURRENT = 4096
CLOSE_S = 5.0
STAGES_S = 2.0
WATCH_S = 2.0
"""Between two looks at the workers."""
Silence = dict[tuple[int, Any], float]
"""By place and worker: the time of the first question that was not answered."""
log = logging.getLogger(__name__)


class WorkerPool:
    """Worker processes as Ray actors. One that dies is replaced at once; the episodes lost with it raise
    InfrastructureError, so that the caller plays them again. One that owes an answer past every bound, one that `watch` finds
    silent, and one in which more than `max_abandoned` environment threads hang, is ended and replaced the same way. `replaced`
    counts them all.
    """

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self._spec = spec
        self._workers: list[Any] = [self._spawn(index) for index in range(count)]
        self._load = [0] * count
        self._abandoned = [0] * count
        self._starting: dict[int, asyncio.Future[Any]] = {}
        self._closed = False
        self._late = Digest(spec.config.watchdog.warn_after)
        self.replaced = 0

    def adopt(self, index: int, engine: Any) -> None:
        """Episodes that begin from now on use `engine` in the place of the one that had this index."""
        engines = list(self._spec.engines)
        engines[index] = engine
        self._spec = replace(self._spec, engines=tuple(engines))
        for worker in self._workers:
            worker.set_engine.remote(index, engine)

    def _spawn(self, index: int) -> Any:
        import ray

        actor = ray.remote(RolloutWorker).options(
            num_cpus=0,
            max_concurrency=MAX_CONCURRENT,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        )
        return actor.remote(self._spec, index)

    async def ready(self) -> None:
        """Every worker can play. Raises InfrastructureError with what kept one from starting."""
        from ray.exceptions import RayActorError

        watch = self._spec.config.watchdog
        answers = asyncio.gather(*(_awaited(worker.ready.remote()) for worker in self._workers))
        try:
            await within(
                answers, "the rollout workers to start", warn_after=watch.warn_after, fail_after=watch.fail_after
            )
        except RayActorError as error:
            raise InfrastructureError(f"a rollout worker did not start: {error}") from error

    async def stages(self) -> dict[str, str]:
        """What each episode waits for, of the workers that answer within STAGES_S."""
        answers, _ = await self._asked()
        return {rollout_id: stage for answer in answers for rollout_id, stage in answer.items()}

    async def _asked(self) -> tuple[list[dict[str, str]], list[tuple[int, Any]]]:
        """(the answers of the workers that live, the places and workers that did not answer within STAGES_S)."""
        asked = {
            asyncio.ensure_future(_awaited(worker.stages.remote())): (index, worker)
            for index, worker in enumerate(self._workers)
        }
        done, late = await asyncio.wait(asked, timeout=STAGES_S)
        for call in late:
            call.cancel()
        return [call.result() for call in done if call.exception() is None], [asked[call] for call in late]

    async def watch(self) -> None:
        """Replace workers that say nothing for `silence_timeout_s`, until cancelled."""
        since: Silence = {}
        while True:
            since = await self._look(since)
            await asyncio.sleep(WATCH_S)

    async def _look(self, since: Silence) -> Silence:
        """Those that are silent now, and since when; `since` is what the look before found. One that only starts is not among
        them, and one that has been silent for too long is replaced.
        """
        began = time.monotonic()
        _, late = await self._asked()
        silent = {place: since.get(place, began) for place in late if place[0] not in self._starting}
        for (index, worker), first in silent.items():
            seconds = time.monotonic() - first
            if seconds > self._spec.config.rollout.silence_timeout_s:
                self._replace(index, worker, f"has answered nothing for {seconds:.0f} s")
        return silent

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        """Raises InfrastructureError when the worker died or did not answer in time."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        index = min(range(len(self._workers)), key=lambda i: self._load[i])
        watch = self._spec.config.watchdog
        self._load[index] += 1
        worker = self._workers[index]
        try:
            worker = await self._started(index)
            result = await within(
                _call(worker.play, order),
                f"episode {order.rollout_id} of group {order.group_id}",
                warn_after=watch.warn_after,
                fail_after=order.limits.longest_s + watch.warn_after,
                warn=self._late,
            )
        except RayActorError as error:
            self._replace(index, worker, "died")
            raise InfrastructureError(f"rollout worker {index} died: {_last_words(error)}") from error
        except RayTaskError as error:
            if isinstance(error.cause, AgentRLError):
                raise error.cause from None
            raise (no_room("an episode's result", error) or error) from error
        except RayError as error:
            message = str(error).splitlines()[0]
            raise InfrastructureError(f"rollout worker {index}: {type(error).__name__}: {message}") from error
        except StoreFullError:
            raise
        except InfrastructureError:
            self._replace(index, worker, "does not answer")
            raise
        finally:
            self._load[index] -= 1
        self._count_abandoned(index, worker, result)
        return result

    async def _started(self, index: int) -> Any:
        """The worker of this place; one that replaced another is waited for, which does not count as the episode's time."""
        watch = self._spec.config.watchdog
        while index in self._starting:
            what = f"rollout worker {index} to start"
            starting = asyncio.shield(self._starting[index])
            await within(starting, what, warn_after=watch.warn_after, fail_after=watch.fail_after)
        return self._workers[index]

    def _count_abandoned(self, index: int, worker: Any, result: EpisodeResult) -> None:
        self._abandoned[index] += int(result.metrics.get("errors/abandoned_threads", 0))
        if self._abandoned[index] > self._spec.config.rollout.max_abandoned:
            self._replace(index, worker, f"has {self._abandoned[index]} environment threads that hang")

    def _replace(self, index: int, worker: Any, why: str) -> None:
        """A new process in the place of `worker`, once, however many of its episodes report the loss."""
        import ray

        if self._closed or self._workers[index] is not worker:
            return
        log.warning("rollout worker %d %s: replaced", index, why)
        ray.kill(worker)
        self._abandoned[index] = 0
        self._workers[index] = self._spawn(index)
        self.replaced += 1
        starting = asyncio.ensure_future(_awaited(self._workers[index].ready.remote()))
        self._starting[index] = starting
        starting.add_done_callback(lambda done: self._is_up(index, done))

    def _is_up(self, index: int, starting: asyncio.Future[Any]) -> None:
        """Those that wait see how it went."""
        if self._starting.get(index) is starting:
            del self._starting[index]
        if not starting.cancelled():
            starting.exception()

    def close(self) -> None:
        """End every worker's process; none is replaced any more."""
        import ray

        self._closed = True
        for worker in self._workers:
            ray.kill(worker)


def _last_words(error: Any) -> str:
    """Why an actor died, in one line; of one that did not start, what its constructor raised."""
    lines = str(error).strip().splitlines()
    return lines[-1] if error.actor_init_failed else lines[0]


async def _awaited(reference: Any) -> Any:
    return await reference


async def _call(method: Any, order: EpisodeOrder) -> EpisodeResult:
    """One actor call; a cancelled caller cancels the episode in the worker, which has CLOSE_S to close its environment."""
    import ray

    reference = sent(method.remote, "a task", order)
    answer = asyncio.ensure_future(_awaited(reference))
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        ray.cancel(reference)
        await asyncio.wait([answer], timeout=CLOSE_S)
        if not answer.cancel() and not answer.cancelled():
            answer.exception()
        raise
