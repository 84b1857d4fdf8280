"""The handle of an engine in another process."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import EngineError
from agentrl.engine import Health
from agentrl.engines.fleet import EngineFleet
from agentrl.engines.vllm_actor import RayEngine


class Stalled:
    """Says that it is well, and pauses never."""

    async def health(self) -> Health:
        return Health(True, 0)

    async def pause(self, mode: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def resume(self) -> None: ...


@pytest.mark.slow
async def test_an_engine_that_leaves_an_order_unanswered_is_lost_whatever_it_says_then(ray_cluster: None) -> None:
    import ray

    actor = ray.remote(Stalled).options(num_cpus=0, max_concurrency=8).remote()
    fleet, lost = EngineFleet([RayEngine(actor, 0, control_timeout_s=2.0)]), []

    def lose(index: int, why: str) -> None:
        fleet.out.add(index)
        lost.append((index, why))

    fleet.lost = lose
    try:
        await fleet.publish(None, 1)
        assert lost == [(0, "the engine actor did not answer within 2 s")]
        assert not (await fleet.engines[0].health()).ok
        fleet.lost, fleet.out = None, set()
        with pytest.raises(EngineError, match="did not answer within 2 s"):
            await fleet.publish(None, 2)
    finally:
        ray.kill(actor)
