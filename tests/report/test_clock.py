"""Laps of a step on a clock that moves when told to."""

from __future__ import annotations

import time

import pytest

from agentrl.report.clock import StepClock

from .builders import episode, row


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch):
    """wait(seconds)"""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_laps_add_up_to_the_step(wait) -> None:
    clock = StepClock()
    wait(50)
    clock.start()
    wait(6)
    clock.lap("rollout_wait")
    wait(3)
    clock.lap("train")
    wait(1)
    found = clock.finish([episode(rows=[row(7, 2)]), episode(rows=[row(3, 2)])])
    assert found["time/rollout_wait"] == 6 and found["time/train"] == 3 and found["time/step"] == 10
    assert found["time/bubble"] == pytest.approx(0.6)
    assert found["throughput/tokens"] == 1.0 and found["throughput/episodes"] == pytest.approx(0.2)
    assert found["memory/rss"] > 1e6 and found["time"] == pytest.approx(time.time(), abs=60)


def test_a_new_step_forgets_the_last(wait) -> None:
    clock = StepClock()
    clock.start()
    clock.lap("train")
    clock.start()
    wait(2)
    found = clock.finish([])
    assert "time/train" not in found and found["time/step"] == 2 and found["time/bubble"] == 0


def test_a_step_that_took_no_time_divides_by_nothing(wait) -> None:
    clock = StepClock()
    clock.start()
    assert clock.finish([episode()])["time/step"] > 0
