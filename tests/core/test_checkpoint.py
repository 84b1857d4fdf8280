"""Checkpoints on disk: whatever fails and whenever, what was complete can be loaded; what is pruned, and what is not."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.checkpoint import Checkpoints, RunState, read_state
from agentrl.errors import ConfigError, RunStoppedError


def save(checkpoints: Checkpoints, step: int, weights: str = "w", **state: Any) -> Path:
    async def write(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text(weights)

    return asyncio.run(checkpoints.save(RunState(step, **state), write))


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.complete()]


def test_the_last_ones_stay_by_step_and_not_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (8, 9, 10, 11):
        save(checkpoints, step)
    assert names(checkpoints) == ["step_000010", "step_000011"]
    assert checkpoints.find("latest").name == "step_000011"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010", "step_000011"]


def test_the_best_and_the_pinned_stay_besides(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1, best=0.5, best_step=1)
    (save(checkpoints, 2, best=0.5, best_step=1) / "pinned").touch()
    for step in (3, 4):
        save(checkpoints, step, best=0.5, best_step=1)
    assert names(checkpoints) == ["step_000001", "step_000002", "step_000004"]
    assert checkpoints.find("best").name == "step_000001"
    save(checkpoints, 5, best=0.7, best_step=5)
    assert names(checkpoints) == ["step_000002", "step_000005"]
    assert checkpoints.find("best").name == "step_000005"


def test_a_step_whose_second_save_was_cut_short_is_pruned_like_any_other(tmp_path: Path) -> None:
    """Or every later save would fail at it."""
    checkpoints = Checkpoints(tmp_path, 1)
    for half in (tmp_path / "step_000001.part" / "trainer", tmp_path / "step_000002.part" / "trainer"):
        save(checkpoints, 1)
        half.mkdir(parents=True)
        save(checkpoints, 3)
        assert names(checkpoints) == ["step_000003"]
    checkpoints.go_on_from(checkpoints.find("latest"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003"]


def test_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    shutil.copytree(save(checkpoints, 10), tmp_path / "step_000010_backup")
    save(checkpoints, 20)
    assert names(checkpoints) == ["step_000020"] and (tmp_path / "step_000010_backup").is_dir()


def test_the_state_comes_back(tmp_path: Path) -> None:
    state = {"version": 4, "next_draw": 9, "reissue": (3, 7), "evaluated": 5, "best": 0.25, "best_step": 2}
    folder = save(Checkpoints(tmp_path, 2), 5, **state)
    assert read_state(folder) == RunState(5, **state)


def test_a_full_disk_is_loud_and_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1)

    async def write(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        RunStoppedError, match=r"step 2 could not be saved: OSError.*No space left.*goes on from step_000001"
    ):
        asyncio.run(checkpoints.save(RunState(2), write))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert checkpoints.find("latest").name == "step_000001"


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_weights_that_do_not_fit_are_loud_whoever_writes_them(tmp_path: Path, kind: str) -> None:
    """For real: the process may write no file of more than 64 KiB, which is a full disk in the middle of the weights."""
    import torch
    from safetensors.torch import save_file

    checkpoints, weights = Checkpoints(tmp_path, 1), {"w": torch.zeros(1 << 18)}
    save(checkpoints, 1)

    async def write(folder: Path) -> None:
        if kind == "torch":
            torch.save(weights, folder / "weights")
        else:
            save_file(weights, folder / "weights")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        said = r"step 2 could not be saved: .* \(its disk has [\d.]+ of [\d.]+ GiB free\)\. .*goes on from step_000001"
        with pytest.raises(RunStoppedError, match=said):
            asyncio.run(checkpoints.save(RunState(2), write))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert read_state(checkpoints.find("latest")).step == 1


@pytest.mark.parametrize("call", range(12))
def test_a_crash_at_any_moment_of_saving_a_step_again_leaves_one_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Every change of the folder is a moment at which the process may die: nothing after it happens."""
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1, "old")
    save(checkpoints, 2, "old")
    seen = -1

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen >= call:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return change

    for module, name in ((os, "replace"), (shutil, "rmtree"), (os, "fsync")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    try:
        save(checkpoints, 2, "new")
    except KeyboardInterrupt:
        pass
    else:
        assert seen < call
    monkeypatch.undo()
    found = Checkpoints(tmp_path, 1).find("latest")
    assert read_state(found).step == 2
    assert (found / "trainer" / "weights").read_text() in ("old", "new")
    save(checkpoints, 2, "newest")
    assert (checkpoints.find("latest") / "trainer" / "weights").read_text() == "newest"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002"]


def test_who_goes_back_finds_the_latest_and_the_best_of_his_own_line(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 9)
    save(checkpoints, 5, best=0.3, best_step=5)
    save(checkpoints, 8, best=0.5, best_step=8)
    save(checkpoints, 10, best=0.9, best_step=10)
    state = checkpoints.go_on_from(tmp_path / "step_000008")
    assert (state.step, state.best, state.best_step) == (8, 0.5, 8)
    assert checkpoints.find("latest") == checkpoints.find("best") == tmp_path / "step_000008"
    save(checkpoints, 10, best=0.5, best_step=8)
    assert checkpoints.find("best").name == "step_000008" and checkpoints.find("latest").name == "step_000010"
    shutil.rmtree(tmp_path / "step_000008")
    gone = checkpoints.go_on_from(tmp_path / "step_000010")
    assert gone.best is None and gone.best_step is None
    with pytest.raises(ConfigError, match="--resume best: there is no checkpoint"):
        checkpoints.find("best")


def test_a_best_whose_folder_another_line_has_taken_is_forgotten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 9)
    for step, best in ((5, 5), (8, 8), (10, 8)):
        save(checkpoints, step, best=best / 10, best_step=best)
    checkpoints.go_on_from(tmp_path / "step_000005")
    save(checkpoints, 8, best=0.5, best_step=5)
    assert checkpoints.go_on_from(tmp_path / "step_000010").best is None
    assert not (tmp_path / "best").exists()
    checkpoints.go_on_from(tmp_path / "step_000008")
    assert checkpoints.find("best").name == "step_000005"


@pytest.mark.parametrize("marker", ["best", "latest"])
def test_a_marker_that_cannot_be_written_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1, best=0.1, best_step=1)
    replace = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == marker:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    left = "step_000002" if marker == "best" else "step_000001"
    with pytest.raises(RunStoppedError, match=f"No space left.*goes on from {left}"):
        save(checkpoints, 2, best=0.2, best_step=2)
    assert checkpoints.find("latest").name == left


@pytest.mark.parametrize("which", ["", ".", "..", "/", "step_9"])
def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, which: str) -> None:
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        Checkpoints(tmp_path, 1).find(which)


def test_half_a_checkpoint_is_not_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    (tmp_path / "step_000003.part").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint"):
        checkpoints.find("latest")
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        checkpoints.find(str(tmp_path / "step_000003"))
    assert checkpoints.complete() == []
