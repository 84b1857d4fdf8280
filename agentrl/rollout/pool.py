"""The rollout workers of a run, as one player: the least loaded takes the next episode."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import InfrastructureError
from .episode import EpisodeOrder, EpisodeResult
from .watchdog import within
from .worker import RolloutWorker, WorkerSpec

MAX_CONCURRENT = 4096


class WorkerPool:
    """Ray actors, restarted by Ray when their process dies; the episodes lost with it raise InfrastructureError.

    A worker in which more than `max_abandoned` environment threads hang is replaced.
    """

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        import ray

        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=MAX_CONCURRENT)(
            RolloutWorker
        )
        env = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        self._workers: list[Any] = [actor.options(runtime_env=env).remote(spec) for _ in range(count)]
        self._load = [0] * count
        self._abandoned = [0] * count
        self._spec = spec

    async def ready(self) -> None:
        """Every worker can play. Raises the error that kept one from starting."""
        watch = self._spec.config.watchdog
        await within(
            asyncio.gather(*(worker.ready.remote() for worker in self._workers)),
            "the rollout workers to start",
            warn_after=watch.warn_after,
            fail_after=watch.fail_after,
        )

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        """Raises InfrastructureError when the worker died or did not answer in time."""
        from ray.exceptions import RayActorError

        index = min(range(len(self._workers)), key=lambda i: self._load[i])
        self._load[index] += 1
        watch = self._spec.config.watchdog
        bound = order.limits.episode_timeout_s + order.limits.call_timeout_s + watch.warn_after
        try:
            result = await within(
                _call(self._workers[index].play, order),
                f"episode {order.rollout_id}",
                warn_after=watch.warn_after,
                fail_after=bound,
            )
        except RayActorError as error:
            raise InfrastructureError(f"rollout worker {index} died: {str(error).splitlines()[0]}") from error
        finally:
            self._load[index] -= 1
        self._count_abandoned(index, result)
        return result

    def _count_abandoned(self, index: int, result: EpisodeResult) -> None:
        import ray

        self._abandoned[index] += int(result.metrics.get("errors/abandoned_threads", 0))
        if self._abandoned[index] > self._spec.config.rollout.max_abandoned:
            self._abandoned[index] = 0
            ray.kill(self._workers[index], no_restart=False)

    def close(self) -> None:
        import ray

        for worker in self._workers:
            ray.kill(worker)


async def _call(method: Any, order: EpisodeOrder) -> EpisodeResult:
    """One actor call; a cancelled caller cancels the episode in the worker."""
    import ray

    reference = method.remote(order)
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
