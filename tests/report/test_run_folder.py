"""The run folder: steps rise by one whatever was interrupted, and nothing of an earlier run is lost."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.report.progress import Reporters, SilentReporter
from agentrl.report.run_folder import RunFolder


def _begun(folder: RunFolder) -> RunFolder:
    folder.begin("", None)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return _begun(RunFolder.fresh(str(tmp_path / "runs"), "one"))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_a_run_is_not_written_over(folder: RunFolder) -> None:
    parent, name = str(folder.path.parent), folder.path.name
    RunFolder.fresh(parent, name)
    folder.add_metrics({"step": 0})
    with pytest.raises(ConfigError, match="--resume"):
        RunFolder.fresh(parent, name)


def test_what_a_run_left_that_ended_before_its_first_step_moves_aside(folder: RunFolder) -> None:
    folder.add_rollouts(1, [{"draw": 0, "outcome": "cancelled"}])
    again = _begun(RunFolder.fresh(str(folder.path.parent), folder.path.name))
    again.add_rollouts(1, [{"draw": 0, "outcome": "trained"}])
    assert lines(again.rollouts(1)) == [{"draw": 0, "outcome": "trained"}]
    assert [path.name for path in (again.path / "superseded").iterdir()] == ["step_000001.jsonl"]


def test_a_folder_is_written_by_one_process(folder: RunFolder) -> None:
    other = "import sys; from agentrl.report.run_folder import RunFolder\nwith RunFolder(sys.argv[1]).locked(): print('mine')"
    command = [sys.executable, "-c", other, str(folder.path)]
    with folder.locked():
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode and "is being written by another process" in refused.stderr and not refused.stdout
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "mine\n"


def test_records_are_appended(folder: RunFolder) -> None:
    for step in (0, 1):
        folder.add_metrics({"step": step})
    folder.add_rollouts(1, [{"rollout_id": "a"}])
    folder.add_rollouts(1, [{"rollout_id": "ü"}])
    assert lines(folder.metrics) == [{"step": 0}, {"step": 1}]
    assert [line["rollout_id"] for line in lines(folder.rollouts(1))] == ["a", "ü"]
    assert folder.rollouts(1).name == "step_000001.jsonl"


def test_amending_adds_to_the_newest_step(folder: RunFolder) -> None:
    folder.add_metrics({"step": 1, "a": 1})
    folder.add_metrics({"step": 2, "a": 1})
    folder.amend_metrics({"step": 2, "b": 2})
    assert lines(folder.metrics) == [{"step": 1, "a": 1}, {"step": 2, "a": 1, "b": 2}]


def test_a_number_that_is_not_finite_is_left_out_and_counted(folder: RunFolder) -> None:
    """JSON has no form for it: every reader but Python's would stop at the line."""
    folder.add_metrics({"step": 1, "a": math.nan, "b": math.inf, "c": 1.0, "text": "nan"})
    folder.amend_metrics({"step": 1, "d": -math.inf, "e": 2})
    assert lines(folder.metrics) == [{"step": 1, "c": 1.0, "text": "nan", "e": 2, "not_finite": 3.0}]
    seen: list[dict[str, Any]] = []
    sink = SilentReporter()
    sink.step = sink.evaluation = seen.append  # type: ignore[method-assign]
    both = Reporters([sink])
    both.step({"step": 2, "a": math.nan})
    both.evaluation({"step": 2, "b": 0.5})
    assert seen == [{"step": 2, "not_finite": 1.0}, {"step": 2, "b": 0.5}]


def test_amending_a_step_without_a_record_makes_one(folder: RunFolder) -> None:
    folder.amend_metrics({"step": 0, "b": 2})
    folder.amend_metrics({"step": 1, "b": 3})
    first, second = lines(folder.metrics)
    assert (first.pop("time"), second.pop("time")) == (pytest.approx(time.time(), abs=60),) * 2
    assert (first, second) == ({"step": 0, "b": 2}, {"step": 1, "b": 3})


def test_rewinding_moves_later_records_aside(folder: RunFolder) -> None:
    for step in range(4):
        folder.add_metrics({"step": step})
        folder.add_rollouts(step, [{"step": step}])
    folder.rewind(2)
    assert [line["step"] for line in lines(folder.metrics)] == [0, 1, 2]
    assert not folder.rollouts(3).exists()
    superseded = folder.path / "superseded"
    assert lines(superseded / "step_000003.jsonl") == [{"step": 3}]
    assert [line["step"] for line in lines(superseded / "metrics.jsonl")] == [0, 1, 2, 3]


def test_rewinding_twice_keeps_both(folder: RunFolder) -> None:
    for attempt in range(2):
        folder.add_metrics({"step": attempt + 1, "attempt": attempt})
        folder.add_rollouts(3, [{"attempt": attempt}])
        folder.rewind(0)
    superseded = folder.path / "superseded"
    assert lines(superseded / "step_000003.jsonl") == [{"attempt": 0}]
    assert lines(superseded / "step_000003.1.jsonl") == [{"attempt": 1}]
    assert (superseded / "metrics.1.jsonl").is_file()


def test_rewinding_to_where_it_is_changes_nothing(folder: RunFolder) -> None:
    folder.add_metrics({"step": 1})
    folder.rewind(1)
    assert not (folder.path / "superseded").exists()


def test_rewinding_an_empty_folder_is_fine(folder: RunFolder) -> None:
    folder.rewind(0)
    assert not folder.metrics.exists()


def test_a_line_cut_by_a_crash_is_not_read_as_one(folder: RunFolder) -> None:
    folder.add_metrics({"step": 1})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "rew')
    folder.amend_metrics({"step": 1, "a": 2})
    folder.rewind(1)
    assert lines(folder.metrics) == [{"step": 1, "a": 2}]


def test_any_text_is_one_line_and_comes_back(folder: RunFolder) -> None:
    text = "a\u2028b\x85c\n\ud800"
    folder.add_rollouts(1, [{"text": text}, {"text": "next"}])
    assert [line["text"] for line in lines(folder.rollouts(1))] == [text, "next"]


def test_what_json_cannot_hold_is_its_str(folder: RunFolder) -> None:
    folder.add_rollouts(1, [{"path": Path("x")}])
    assert lines(folder.rollouts(1)) == [{"path": "x"}]


def test_a_full_disk_leaves_the_config_of_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the run could not go on."""
    folder.begin("[run]\nseed = 3\n", None)

    def full(path: Path, text: str, encoding: str) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InfrastructureError, match="No space left"):
        folder.begin("[run]\nseed = 3\n", 0)
    assert (folder.path / "config.toml").read_text() == "[run]\nseed = 3\n"


def test_config_is_kept_as_given(folder: RunFolder) -> None:
    folder.begin("[env]\nname = 'ü'\n", None)
    assert (folder.path / "config.toml").read_text() == "[env]\nname = 'ü'\n"
