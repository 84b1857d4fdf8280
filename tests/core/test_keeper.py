"""Engines that are lost: who is replaced, what waits for it, and what weights the new one gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentrl import Limits, Reply, Sampling, ScriptedEngine, Task
from agentrl.config import Config
from agentrl.engine import Health
from agentrl.engines.fleet import EngineFleet
from agentrl.engines.keeper import EngineKeeper, KeptPlayer
from agentrl.errors import EngineError, RunStoppedError
from agentrl.evaluation import BackgroundEvaluation, Evaluator
from agentrl.rollout.episode import EpisodeOrder, EpisodeResult, failed
from agentrl.weight_sync import WeightSync


class Mortal(ScriptedEngine):
    """An engine that can die: then every call fails and it is not healthy."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(lambda request: Reply([1]), version)
        self.dead = False

    async def pause(self, mode: Any) -> None:
        self._live()
        await super().pause(mode)

    async def update_weights(self, source: Any, version: int) -> None:
        self._live()
        await super().update_weights(source, version)

    async def resume(self) -> None:
        self._live()
        await super().resume()

    async def health(self) -> Health:
        return Health(not self.dead, self.version)

    def _live(self) -> None:
        if self.dead:
            raise EngineError("gone")


class Weights:
    """A trainer that only publishes."""

    def __init__(self) -> None:
        self.published: list[int] = []

    async def publish(self, version: int) -> int:
        self.published.append(version)
        return version

    async def release(self, source: Any) -> None:
        pass


class Parts:
    def __init__(self, most: int = 3) -> None:
        self.fleet = EngineFleet([Mortal(4), Mortal(4)])
        self.trainer = Weights()
        self.sync = WeightSync(Config(), self.trainer, self.fleet, 4)  # type: ignore[arg-type]
        self.spawned: list[Mortal] = []
        self.asked = asyncio.Event()
        self.keeper = EngineKeeper(self.fleet, self.respawn, self.sync.give, most)

    async def respawn(self, index: int) -> Mortal:
        self.asked.set()
        await asyncio.sleep(0)
        self.spawned.append(Mortal(0))
        return self.spawned[-1]

    def kill(self, index: int) -> None:
        self.fleet.engines[index].dead = True  # type: ignore[attr-defined]


def order(engine: int, training: bool = True) -> EpisodeOrder:
    return EpisodeOrder("r", "g", 0, 0, Task("t"), 0, 0, Sampling(), Limits(), engine, training)


class Losing:
    """Every episode loses its engine."""

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        return failed(order, EngineError("no answer"))


async def test_a_dead_engine_is_replaced_once_and_serves_the_current_weights() -> None:
    parts = Parts()
    player = KeptPlayer(Losing(), parts.keeper)
    parts.kill(1)
    await asyncio.gather(*(player.play(order(1)) for _ in range(5)), player.play(order(0)))
    await parts.keeper.ready(1)
    (new,) = parts.spawned
    assert parts.fleet.engines[1] is new and new.version == 4 and not parts.fleet.out
    assert [call[0] for call in new.calls] == ["pause", "update_weights", "resume"]
    await parts.sync.publish(5)
    assert [engine.version for engine in parts.fleet.engines] == [5, 5]


async def test_an_engine_that_answers_is_not_replaced() -> None:
    parts = Parts()
    await KeptPlayer(Losing(), parts.keeper).play(order(0))
    await parts.keeper.ready(0)
    assert not parts.spawned


async def test_a_new_engine_waits_for_a_step_and_gets_what_that_gives() -> None:
    parts = Parts()
    parts.kill(0)
    async with parts.sync.trainer_free:
        parts.keeper.lose(0, "seen by an episode")
        await asyncio.sleep(0.01)
        await parts.sync.publish(5)
        assert parts.fleet.out == {0} and parts.trainer.published == [5]
    await parts.keeper.ready(0)
    assert [engine.version for engine in parts.fleet.engines] == [5, 5]


async def test_an_engine_that_dies_in_an_update_does_not_stop_the_others() -> None:
    parts = Parts()
    parts.kill(0)
    async with parts.sync.trainer_free:
        await parts.sync.publish(5)
    await parts.keeper.ready(0)
    assert [engine.version for engine in parts.fleet.engines] == [5, 5]
    assert all(engine.calls[-1] == ("resume",) for engine in parts.fleet.engines)  # type: ignore[attr-defined]


async def test_a_healthy_engine_that_refuses_weights_is_a_failure() -> None:
    parts = Parts()

    async def refuse(source: Any, version: int) -> None:
        raise EngineError("no parameter of that name")

    parts.fleet.engines[0].update_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no parameter"):
        await parts.sync.publish(5)
    assert not parts.spawned


async def test_engines_are_not_replaced_for_ever() -> None:
    parts = Parts(most=2)
    for _ in range(2):
        parts.keeper.lose(0, "gone")
        await parts.keeper.ready(0)
    parts.keeper.lose(0, "gone again")
    with pytest.raises(RunStoppedError, match=r"engine 0 is lost .gone again., after 2 engines"):
        await parts.keeper.ready(0)


async def test_one_that_dies_while_it_starts_is_replaced_too() -> None:
    """Once before it answers, once before it has the weights."""
    parts = Parts(most=3)
    spawn, ends = parts.respawn, iter(["starting", "loading", "never"])

    async def dying(index: int) -> Mortal:
        new, end = await spawn(index), next(ends)
        new.dead = end == "loading"
        if end == "starting":
            raise EngineError("the engine actor is gone")
        return new

    parts.keeper._respawn = dying
    parts.keeper.lose(0, "gone")
    await parts.keeper.ready(0)
    assert parts.fleet.engines[0] is parts.spawned[2] and parts.keeper.replaced == 3 and not parts.fleet.out
    assert parts.fleet.engines[0].version == 4


async def test_an_engine_that_cannot_be_replaced_stops_the_run() -> None:
    parts = Parts()

    async def fail(index: int) -> Mortal:
        raise EngineError("no memory")

    parts.keeper._respawn = fail
    parts.keeper.lose(1, "gone")
    with pytest.raises(RunStoppedError, match="could not be replaced: no memory"):
        await parts.keeper.ready(1)


class OnFleet:
    """Episodes of one request to the engine of their order; after `dies_after` of them that engine is dead."""

    def __init__(self, parts: Parts, dies_after: int) -> None:
        self.parts, self.left = parts, dies_after
        self.played: list[tuple[str, Any]] = []

    async def play(self, order: EpisodeOrder) -> EpisodeResult:
        await asyncio.sleep(0.001)
        engine: Any = self.parts.fleet.engines[order.engine]
        if engine.dead or not self.left:
            engine.dead = True
            return failed(order, EngineError("gone"))
        self.left -= 1
        self.played.append((order.rollout_id, engine))
        return replace(failed(order, EngineError()), error=None, total_reward=1.0, score=1.0)


def evaluation(parts: Parts, engines: int, dies_after: int, tasks: int = 8) -> tuple[BackgroundEvaluation, OnFleet]:
    del parts.fleet.engines[engines:]
    config = Config.model_validate(
        {"engine": {"count": engines}, "rollout": {"max_episodes": 2}, "eval": {"n": 1, "greedy": False}}
    )
    player = OnFleet(parts, dies_after)
    held_out = [Task(str(i)) for i in range(tasks)]
    kept = KeptPlayer(player, parts.keeper)
    return BackgroundEvaluation(Evaluator(config, kept, held_out, Limits(), keeper=parts.keeper)), player


async def test_an_evaluation_waits_for_the_engine_that_it_lost() -> None:
    """And training for the evaluation's engine, so that the new one still gets the evaluated weights."""
    parts = Parts()
    held_out, player = evaluation(parts, engines=1, dies_after=3)
    slow, may_start = parts.respawn, asyncio.Event()

    async def respawn(index: int) -> Mortal:
        parts.asked.set()
        await may_start.wait()
        player.left = 99
        return await slow(index)

    parts.keeper._respawn = respawn
    held_out.begin(1, 4)
    await parts.asked.wait()
    before_training = asyncio.create_task(held_out.engines_back())
    await asyncio.sleep(0.02)
    assert not before_training.done()
    may_start.set()
    await before_training
    record = await held_out.over()
    assert record is not None and (record["eval/episodes"], record["eval/excluded"]) == (8.0, 0.0)
    assert len(player.played) == len({name for name, _ in player.played}) == 8
    assert [engine for _, engine in player.played[3:]] == parts.spawned * 5 and parts.spawned[0].version == 4


async def test_while_the_trainer_works_only_another_engine_can_stand_in_for_a_lost_one() -> None:
    """Of two engines the other plays on. The last one takes the weights with it: nothing waits, what is missing is counted."""
    for engines, excluded in ((2, 0.0), (1, 5.0)):
        parts = Parts()
        held_out, player = evaluation(parts, engines, dies_after=3)
        held_out.begin(1, 4)
        await held_out.engines_back()
        async with parts.sync.trainer_free:
            await parts.asked.wait()
            player.left = 99
            record = await asyncio.wait_for(held_out.over(), 5)
        assert record is not None and record["eval/excluded"] == excluded
        await parts.keeper.ready(0)
        await parts.keeper.ready(1)
