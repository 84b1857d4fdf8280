"""What a run says of itself while it lives, and how it is shown."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentrl.cli.status import describe
from agentrl.errors import ConfigError
from agentrl.report.status import StatusFile, read_status
from agentrl.rollout.stages import PLAYED, Stages

from .builders import episode, group


async def test_the_file_is_kept_while_the_run_lives_and_then_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one look at the run fails."""
    stages = Stages()
    old, new = group(episode(sample=0), episode(sample=1), draw=3), group(episode(sample=0), draw=4)
    old.n, new.n = 3, 2
    old.began -= 500
    stages.enter("000003-2", PLAYED)
    stages.enter("000004-1", "waits for a seat")
    stages.seen({"000003-2": "waits for the engine (000003-2-0)", "000004-1": "not there"})
    written, looks = asyncio.Event(), 0
    monkeypatch.setattr("agentrl.report.status.EVERY_S", 0.01)

    async def content() -> dict[str, object]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("no answer")
        asyncio.get_running_loop().call_soon(written.set)
        groups = [stages.of_group(one, "in flight") for one in (new, old)]
        return {"step": 7, "version": 6, "doing": "waiting for a batch", "seconds": 12.0, "groups": groups}

    with pytest.raises(ConfigError, match="not the folder of a run"):
        read_status(tmp_path)
    (tmp_path / "status.json").touch()
    with pytest.raises(ConfigError, match=r"status\.json cannot be read"):
        read_status(tmp_path)
    keeping = asyncio.create_task(StatusFile(tmp_path / "status.json", content).keep())
    await written.wait()
    status = read_status(tmp_path)
    assert status["pid"] == os.getpid()
    lines = describe(status, status["time"] + 2)
    assert lines == [
        "step 7, version 6, written 2 s ago",
        "waiting for a batch for 12 s; 2 groups hold places",
        "group 000003 (2/3 episodes) for 500 s: 000003-2 waits for the engine (000003-2-0) for 0 s",
        "group 000004 (1/2 episodes) for 0 s: 000004-1 waits for a seat for 0 s",
    ]
    keeping.cancel()
    await asyncio.wait([keeping])
    assert describe(read_status(tmp_path), status["time"] + 60)[0].startswith("the run ended")
