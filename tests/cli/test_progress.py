"""Progress on the terminal: lines, the live table, and TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.cli import console as consoles
from agentrl.errors import ConfigError
from agentrl.report.progress import (
    BARS,
    History,
    Reporters,
    SilentReporter,
    duration,
    evaluation_line,
    make_reporter,
    sparkline,
    step_line,
)

STEP = {
    "step": 3,
    "version": 3,
    "time": 1e9,
    "time/step": 10.0,
    "reward/mean": 0.25,
    "score/mean": 0.5,
    "length/action": 12.34,
    "staleness/mean": 1.0,
    "throughput/tokens": 1234.5,
    "episodes_in_flight": 16.0,
}
EVALUATED = {"step": 0, "version": 0, "eval/version": 0.0, "eval/reward/mean": 0.1, "eval/greedy/pass@1": 0.2}


def screen(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@given(st.lists(st.floats(-1e6, 1e6), max_size=100))
def test_a_sparkline_has_one_bar_a_value(values: list[float]) -> None:
    assert len(sparkline(values)) == len(values)
    assert set(sparkline(values)) <= set(BARS)


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 7]) == f"{BARS[0]}{BARS[1]}{BARS[2]}{BARS[7]}"
    assert sparkline([3, 3]) == BARS[0] * 2


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (184, "3m04s"), (7500, "2h05m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_step_is_one_line_with_the_time_left() -> None:
    history = History(9)
    history.add(STEP)
    assert step_line(history) == (
        "step 3/9  reward 0.250  score 0.500  length 12.3  staleness 1.00  tokens/s 1234  in flight 16  1m00s left"
    )


def test_missing_keys_are_left_out() -> None:
    history = History(None)
    history.add({"step": 1})
    assert step_line(history) == "step 1/?"


def test_an_evaluation_is_one_line() -> None:
    assert evaluation_line(EVALUATED) == "eval after step 0 (version 0)  reward 0.100  greedy pass@1 0.200"
    assert evaluation_line(STEP) is None


@pytest.mark.parametrize(("mode", "terminal"), [("auto", False), ("plain", False), ("plain", True)])
def test_plain_lines(mode, terminal) -> None:
    console = screen(terminal)
    with make_reporter(mode, 9, console=console) as reporter:
        reporter.stage("starting 1 engine")
        reporter.step(EVALUATED)
        reporter.step(STEP)
        reporter.step({**STEP, "eval/pass@1": 0.75})
        reporter.evaluation({**EVALUATED, "step": 9})
    lines = shown(console).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "starting 1 engine …",
        "eval after step 0 (version 0)",
        "step 3/9",
        "step 3/9",
        "eval after step 3",
        "eval after step 9 (version 0)",
    ]


def test_none_is_silent() -> None:
    console = screen(True)
    with make_reporter("none", 9, console=console) as reporter:
        reporter.step(STEP)
        reporter.evaluation(EVALUATED)
    assert shown(console) == ""


def test_the_live_table_survives_any_record_and_leaves_the_cursor_on() -> None:
    console = screen(True)
    with make_reporter("auto", 9, console=console) as reporter:
        reporter.step(EVALUATED)
        reporter.step({"step": 1})
        reporter.step(STEP)
        reporter.evaluation({"step": 3})
    text = shown(console)
    assert "step 3/9" in text and "0.250" in text and "eval after step 0" in text and "59s left" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_live_table_says_what_is_waited_for() -> None:
    console = screen(True)
    with make_reporter("auto", 9, console=console) as reporter:
        reporter.stage("starting 1 engine")
    assert "starting 1 engine …" in shown(console)


def test_the_live_table_without_an_end() -> None:
    console = screen(True)
    with pytest.raises(KeyboardInterrupt), make_reporter("auto", None, console=console) as reporter:
        reporter.step(STEP)
        raise KeyboardInterrupt
    assert "step 3/?" in shown(console) and shown(console).rindex("\x1b[?25h")


def test_tensorboard_without_its_package_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        make_reporter("none", 9, tensorboard=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_every_number(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_reporter("none", 9, tensorboard=tmp_path / "tb") as reporter:
        reporter.step({**STEP, "text": "x"})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(STEP) - {"step", "time"}
    assert events.Scalars("reward/mean")[0].step == 3


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_a_resumed_run_takes_back_what_tensorboard_had_of_later_steps(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for before, steps in ((0, (1, 2, 3, 4, 5)), (2, (3, 4))):
        with make_reporter("none", 9, tensorboard=tmp_path / "tb") as reporter:
            reporter.evaluation({"step": before, "eval/score/mean": before / 10})
            for step in steps:
                reporter.step({"step": step, "reward/mean": before + step / 10})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.1), (2, 0.2), (3, 2.3), (4, 2.4)]
    assert [event.step for event in events.Scalars("eval/score/mean")] == [0, 2]


def test_a_run_that_fails_is_one_that_failed_wherever_it_is_logged() -> None:
    ended: list[Any] = []

    class Sink(SilentReporter):
        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            ended.append(kind)

    for raised in (ValueError, None):
        with contextlib.suppress(ValueError), Reporters([Sink(), Sink()]):
            if raised is not None:
                raise raised
    assert ended == [ValueError, ValueError, None, None]


def test_a_bar_in_plain_lines_says_each_quarter_once(capsys) -> None:
    with consoles.progress_bar("plain") as bar:
        for i in range(101):
            bar("[work]", i / 100)
    assert capsys.readouterr().err.splitlines() == [f"[work]: {share}%" for share in (0, 25, 50, 75, 100)]


def test_a_bar_may_be_silent(capsys) -> None:
    with consoles.progress_bar("none") as bar:
        bar("work", 0.5)
    assert capsys.readouterr().err == ""
