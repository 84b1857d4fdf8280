"""What is said of episodes that fail: the first of each cause, once a batch, and never megabytes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl import EnvError, InfrastructureError, Task
from agentrl.config import RolloutSection
from agentrl.errors import RunStoppedError
from agentrl.executor import describe_error
from agentrl.rollout.episode import EpisodeResult
from agentrl.rollout.error_rate import ErrorRate


def order(number: int) -> Any:
    return SimpleNamespace(rollout_id=f"{number:06d}-0", task=Task("t"))


def ended(error: BaseException | None, reward: float | None = 1.0) -> EpisodeResult:
    described = None if error is None else describe_error(error)
    return EpisodeResult("r", "g", 0, 0, "t", "e", total_reward=reward, error=described)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return said


def test_a_worker_that_dies_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    errors = ErrorRate(RolloutSection(), 4)
    for number in range(100):
        errors.lost(order(number), 1, describe_error(InfrastructureError(f"worker 0 died in {number} s")))
    errors.lost(order(7), 2, describe_error(InfrastructureError("no answer")))
    assert len(caplog.records) == 101, "all of it is there for those who ask"
    first, other = warned(caplog)
    assert "episode 000000-0: attempt 1 lost, played again: InfrastructureError: worker 0 died" in first
    assert "no answer" in other
    errors.reset()
    errors.lost(order(8), 1, describe_error(InfrastructureError("worker 0 died in 3 s")))
    assert len(warned(caplog)) == 1, "again in the next batch"


def test_the_first_failure_of_a_cause_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorRate(RolloutSection(max_error_rate=0.5), 4)
    for number in range(20):
        errors.note(order(number), ended(EnvError(f"step {number} broke") if number % 2 else None))
    (said,) = warned(caplog)
    assert "e, task t: episode 000001-0 failed" in said and "EnvError: step 1 broke" in said
    errors.check(0)
    errors.note(order(20), ended(EnvError("step 20 broke")))
    errors.check(1)  # the one that is being played may be good
    with pytest.raises(RunStoppedError, match=r"11 of the last 21 episodes failed.*step 20 broke"):
        errors.check(0)


def test_episodes_without_a_verdict_count_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    errors = ErrorRate(RolloutSection(), 4)
    for number in range(10):
        errors.note(order(number), ended(None, None if number else 1.0))
    (said,) = warned(caplog)
    assert "e, task t: episode 000001-0 has no verdict: it was given no reward" in said
    with pytest.raises(
        RunStoppedError, match=r"9 of the last 10 episodes failed or have no.*000009-0, which has no verdict"
    ):
        errors.check(0)


def test_a_rate_of_one_still_ends_where_nothing_comes_out_well() -> None:
    errors = ErrorRate(RolloutSection(max_error_rate=1.0, n_samples=2), 3)
    for number in range(59):
        errors.note(order(number), ended(EnvError("gone")))
        errors.check(0)
    errors.note(order(59), ended(EnvError("gone")))
    with pytest.raises(RunStoppedError, match=r"60 of the last 60 episodes failed.*none came out well.*EnvError: gone"):
        errors.check(0)


def test_an_error_of_megabytes_is_clipped() -> None:
    error = describe_error(EnvError("q" * 5_000_000))
    assert len(error["message"]) < 3000 and len(error["traceback"]) < 10_000
    assert "characters left out" in error["message"]
    assert describe_error(EnvError("short"))["message"] == "short"
