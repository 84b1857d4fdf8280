"""How a run ends that trains nothing, that fails in part, or that is interrupted at its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl import GenerationRequest, Reply, Task, training_run
from agentrl.checkpoint import read_state
from agentrl.errors import RunStoppedError
from agentrl.report.read_record import read_held

from .test_loop import make_loop, records, tasks


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            [Task("0"), Task("1"), Task("2", label="broken")],
            "1 of 3 had no episode with a verdict, 2 of 3 were dropped by the",
        ),
        (iter(()), "there was none"),
    ],
)
async def test_data_of_which_nothing_is_trained_leaves_no_model(given: Any, why: str, tmp_path: Path) -> None:
    """Neither a checkpoint nor a model: whoever finds one would take it for trained."""

    def always_right(request: GenerationRequest) -> Reply:
        return Reply([3, 1])

    loop, trainer, _ = make_loop(
        tmp_path, given, script=always_right, more={"algo": {"filter": {"enable": True}}}, filter_groups=True
    )
    with pytest.raises(RunStoppedError, match=why):
        await asyncio.wait_for(loop.run(), 20)
    assert not trainer.batches and not loop.folder.final.exists() and not loop.checkpoints.complete()


async def test_what_fails_at_once_is_not_all_there_is(tmp_path: Path) -> None:
    """A quarter of the episodes: when all of that is back, the good ones are still being played."""

    def slow(request: GenerationRequest) -> Reply:
        return Reply([3, 1], delay_s=0.1)

    loop, trainer, _ = make_loop(tmp_path, tasks(12, broken=(0, 1, 2)), script=slow)
    await asyncio.wait_for(loop.run(), 20)
    assert sum(map(len, trainer.batches)) == 27


async def test_no_draw_is_lost_by_an_interrupt_of_the_export(tmp_path: Path) -> None:
    """The interrupt saves once more, what the last checkpoint of the run held."""
    loop, trainer, _ = make_loop(
        tmp_path, tasks(40), more={"rollout": {"n_samples": 3, "oversample": 3}}, steps=2, stale="drop"
    )
    exporting = asyncio.Event()

    async def export(folder: Path) -> None:
        exporting.set()
        await asyncio.sleep(60)

    trainer.export = export  # type: ignore[method-assign]
    run = asyncio.ensure_future(training_run._run(SimpleNamespace(resume_from=None), loop))  # type: ignore[arg-type]
    await exporting.wait()
    before = read_state(loop.checkpoints.find("latest"))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert read_state(loop.checkpoints.find("latest")) == before
    trained = {record["draw"] for record in records(tmp_path) if record["outcome"] == "trained"}
    held = read_held(loop.checkpoints.find("latest"), before.next_draw, before.reissue)
    kept = {*held.reissue, *(group.draw for group in held.groups)}
    assert trained.isdisjoint(kept) and trained | kept == set(range(before.next_draw)) != trained
