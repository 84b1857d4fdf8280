"""Convention 18: groups without signal are dropped whole and replaced. Convention 9: what a batch without signal costs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import GenerationRequest, Reply
from agentrl.errors import RunStoppedError
from agentrl.training import TrainReport

from .test_loop import make_loop, records, tasks

A, B, END = 3, 4, 1


def dull(*draws: int) -> Callable[[GenerationRequest], Reply]:
    """Every member of these draws earns the same; of the others only the first earns anything."""

    def reply(request: GenerationRequest) -> Reply:
        draw, sample, _ = (int(part) for part in request.request_id.split("-"))
        right = draw not in draws and sample == 0
        return Reply([A if right else B, END], [-0.5, -0.1])

    return reply


async def test_convention_18_groups_are_dropped_whole_and_replaced(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(50), script=dull(0, 3, 4), filter_groups=True, steps=3)
    await loop.run()
    for rows in trainer.batches:
        members = Counter(row.group_id for row in rows)
        assert list(members.values()) == [3, 3], "whole groups, as many as a batch takes"
        assert not members.keys() & {"000000", "000003", "000004"}
    outcomes = Counter((record["draw"], record["outcome"]) for record in records(tmp_path))
    assert {draw for draw, outcome in outcomes if outcome == "filtered"} == {0, 3, 4}
    assert set(outcomes.values()) == {3}, "all members of a group share its fate, and each is recorded once"
    metrics = [json.loads(line) for line in loop.folder.metrics.open()]
    assert sum(record["groups/filtered"] for record in metrics) == 3


async def test_convention_18_the_range_is_on_the_mean_score(tmp_path: Path) -> None:
    """Scores 1 and 0, 0 of a group's three members: a mean of 2/3 over two turns with a reward each, so 0.67."""
    for low, kept in ((0.5, True), (0.7, False)):
        more = {"algo": {"filter": {"range": (low, 0.9), "max_rounds": 2}}}
        loop, trainer, _ = make_loop(tmp_path / str(low), tasks(4), script=dull(), filter_groups=True, more=more)
        if kept:
            await loop.run()
            assert len(trainer.batches) == 2
        else:
            with pytest.raises(RunStoppedError, match="group filter"):
                await loop.run()
            await loop.dispatcher.stop()


async def test_convention_18_a_run_without_signal_stops_and_names_the_filter(tmp_path: Path) -> None:
    more = {"algo": {"filter": {"max_rounds": 3}}}
    loop, trainer, _ = make_loop(tmp_path, tasks(100), script=dull(*range(100)), filter_groups=True, more=more)
    with pytest.raises(RunStoppedError, match=r"group filter dropped \d+ groups.*algo\.filter\.max-rounds"):
        await loop.run()
    assert not trainer.batches
    await loop.dispatcher.stop()


async def test_convention_18_exhausted_data_trains_the_short_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(4), script=dull(0, 2, 3), filter_groups=True)
    with caplog.at_level(logging.WARNING):
        await loop.run()
    assert [{row.group_id for row in rows} for rows in trainer.batches] == [{"000001"}]
    assert "exhausted: the last batch has 1 of 2 groups" in caplog.text


async def test_convention_09_a_batch_without_signal_gives_its_places_back_and_no_version(tmp_path: Path) -> None:
    loop, trainer, engine = make_loop(tmp_path, tasks(6), max_staleness=0)
    train: Any = trainer.train

    async def skipping(rows: Any, step: int) -> TrainReport:
        report: TrainReport = await train(rows, step)
        report.updated = step != 2
        return report

    trainer.train = skipping  # type: ignore[method-assign]
    await loop.run()
    metrics = [json.loads(line) for line in loop.folder.metrics.open()]
    assert [(record["step"], record["version"]) for record in metrics] == [(1, 1), (2, 1), (3, 2)]
    assert [line for line in trainer.log if line != "release"] == ["publish 1", "publish 2"]
    assert engine.version == 2
