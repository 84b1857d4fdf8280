"""A disk that takes nothing more ends a run in one paragraph, and what is saved stays."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.errors import RunStoppedError
from agentrl.training_run import _run

from .test_loop import make_loop, records, tasks


async def test_a_disk_that_is_full_ends_the_run_in_one_paragraph(tmp_path: Path) -> None:
    """For real: the records of the third step, and of what is in flight then, go to a device that has no room."""
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000003.jsonl").symlink_to("/dev/full")
    loop, _, _ = make_loop(tmp_path, tasks(20), more={"ckpt": {"every": 1}, "rollout": {"n_samples": 2}})
    said = r"stopped after step 2: .*step_000003.jsonl cannot be written: No space left on device \(its disk has .*step_000002"
    with pytest.raises(RunStoppedError, match=said):
        await _run(SimpleNamespace(resume_from=None), loop)  # type: ignore[arg-type]
    (tmp_path / "rollouts" / "step_000003.jsonl").unlink()
    checkpoint = loop.checkpoints.find("latest")
    again, _, _ = make_loop(tmp_path, tasks(20), more={"rollout": {"n_samples": 2}}, resume=checkpoint)
    again.folder.begin("", 2)
    await again.run()
    assert [json.loads(line)["step"] for line in again.folder.metrics.open()] == list(range(1, 11))
    assert Counter(record["draw"] for record in records(tmp_path)) == dict.fromkeys(range(20), 2)


async def test_an_export_that_fails_says_what_is_left(tmp_path: Path) -> None:
    loop, trainer, _ = make_loop(tmp_path, tasks(4))

    async def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.export = fail  # type: ignore[method-assign]
    with pytest.raises(
        RunStoppedError, match=r"export of the model to .*final failed: OSError.*goes on from step_000002"
    ):
        await loop.run()
