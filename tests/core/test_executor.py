"""An executor of the user's own: whatever trajectory it returns belongs to the episode it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import AgentExecutorBase, Generation, Limits, Reply, RolloutContext, Sampling, ScriptedEngine, Span, Task
from agentrl import Trajectory as Record
from agentrl.config import Config
from agentrl.preflight import EnvFacts, Ready
from agentrl.rollout.episode import EpisodeOrder
from agentrl.rollout.worker import EpisodePlayer


class OwnRecord(AgentExecutorBase):
    """Makes its trajectory as the protocol has it, without ids."""

    async def execute(self, task: Task, ctx: RolloutContext) -> Record:
        record = Record(task)
        sampled = Generation((1, 2), (-0.5, -0.5), (Span(0, 0, 2),), "stop")
        record.add_sampled(record.add(None, "prompt", [7]), sampled).reward = 1.0
        return record


async def test_rows_carry_the_ids_of_the_episode() -> None:
    renderer: Any = None
    player = EpisodePlayer([ScriptedEngine([Reply()])], renderer, OwnRecord(), env="mine")
    for sample in range(2):
        order = EpisodeOrder(f"000003-{sample}", "000003", 3, sample, Task("t"), 0, 0, Sampling(), Limits())
        (row,) = (await player.play(order)).rows
        assert (row.rollout_id, row.group_id, row.env) == (order.rollout_id, "000003", "mine")


@pytest.mark.parametrize(
    ("config", "opening", "most"),
    [({"vision_config": {}}, 0, 4), ({"vision_config": {}}, 2, 8), ({}, 0, 0)],
    ids=["pictures may come later", "two a turn", "a text model"],
)
def test_the_engine_takes_as_many_pictures_as_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], opening: int, most: int
) -> None:
    monkeypatch.setattr("agentrl.preflight.model_config", _answer(config))
    facts = EnvFacts(None, images=opening)
    ready = Ready(Config(), str(tmp_path), {}, [], facts, Limits(max_turns=4), ())
    assert ready.max_images == most


def _answer(value: Any) -> Callable[[Any], Any]:
    return lambda _: value
