"""Training as a person sees it: a live table on a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .finite import finite
from .tensorboard import TensorBoardSink
from .weights_and_biases import WandbRun, WandbSink

RECENT = 48
TIMED = 8
BARS = "▁▂▃▄▅▆▇█"

Shown = tuple[tuple[str, str, str], ...]
"""(key of the record, heading, format); the first key is drawn as a curve."""
SHOWN: Shown = (
    ("reward/mean", "reward", "{:.3f}"),
    ("score/mean", "score", "{:.3f}"),
    ("length/action", "length", "{:.1f}"),
    ("staleness/mean", "staleness", "{:.2f}"),
    ("throughput/tokens", "tokens/s", "{:.0f}"),
    ("episodes_in_flight", "in flight", "{:.0f}"),
)
SHOWN_SUPERVISED: Shown = (
    ("train/loss", "loss", "{:.4f}"),
    ("train/accuracy", "accuracy", "{:.3f}"),
    ("train/margin", "margin", "{:.3f}"),
    ("train/grad_norm", "gradient", "{:.2f}"),
    ("throughput/tokens", "tokens/s", "{:.0f}"),
)


EVALUATED = ("reward/mean", "score/mean", "loss", "accuracy", "margin")
"""How the keys of an evaluation that are shown end."""


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One block character a value, from the lowest to the highest; all alike when the values are."""
    if not values:
        return ""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    width = high - low
    places = [0.0 if width <= 0 else (value - low) / width for value in values]
    return "".join(BARS[min(int(place * len(BARS)), len(BARS) - 1)] for place in places)


def duration(seconds: float) -> str:
    """12s, 3m04s, 2h05m."""
    whole = max(int(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class History:
    """What has been reported so far. Records may lack any key but `step`."""

    def __init__(self, steps: int | None, shown: Shown = SHOWN) -> None:
        self.steps = steps
        self.shown = shown
        self.last: dict[str, Any] = {}
        self.curve: deque[float] = deque(maxlen=RECENT)
        self.evaluations: list[str] = []
        self._seconds: deque[float] = deque(maxlen=TIMED)

    def add(self, record: Mapping[str, Any]) -> None:
        self.last = dict(record)
        drawn = self.shown[0][0]
        if drawn in record:
            self.curve.append(float(record[drawn]))
        if "time/step" in record:
            self._seconds.append(float(record["time/step"]))

    def add_evaluation(self, record: Mapping[str, Any]) -> str | None:
        """The line of the evaluation in a record; None when there is none in it."""
        line = evaluation_line(record)
        if line is not None:
            self.evaluations.append(line)
        return line

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, from the last few steps; None while unknown."""
        if self.steps is None or not self._seconds:
            return None
        return (self.steps - int(self.last["step"])) * sum(self._seconds) / len(self._seconds)

    @property
    def place(self) -> str:
        return f"{self.last.get('step', 0)}/{'?' if self.steps is None else self.steps}"


def step_line(history: History) -> str:
    """The newest step in one line."""
    record = history.last
    parts = [f"step {history.place}"]
    parts += [f"{heading} {shape.format(record[key])}" for key, heading, shape in history.shown if key in record]
    if history.left_s is not None:
        parts.append(f"{duration(history.left_s)} left")
    return "  ".join(parts)


def evaluation_line(record: Mapping[str, Any]) -> str | None:
    """The eval/… keys of a record in one line; None when it has none."""
    found = {key.removeprefix("eval/"): value for key, value in record.items() if key.startswith("eval/")}
    version = found.pop("version", None)
    named = [key for key in found if key.endswith(EVALUATED) or "pass@" in key]
    if not named:
        return None
    values = "  ".join(f"{key.removesuffix('/mean').replace('/', ' ')} {found[key]:.3f}" for key in named)
    return (
        f"eval after step {record['step']}" + ("" if version is None else f" (version {version:.0f})") + f"  {values}"
    )


class SilentReporter:
    """Shows nothing."""

    def __enter__(self) -> SilentReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def stage(self, doing: str) -> None:
        return None

    def step(self, record: dict[str, Any]) -> None:
        return None

    def evaluation(self, record: dict[str, Any]) -> None:
        return None


class PlainReporter(SilentReporter):
    """A line a stage, a step and an evaluation, written at once."""

    def __init__(self, console: Console, steps: int | None, shown: Shown = SHOWN) -> None:
        self._console = console
        self._history = History(steps, shown)

    def stage(self, doing: str) -> None:
        self._console.print(f"{doing} …", markup=False, soft_wrap=True)

    def step(self, record: dict[str, Any]) -> None:
        if record["step"] > 0:
            self._history.add(record)
            self._console.print(step_line(self._history), markup=False, soft_wrap=True)
        self.evaluation(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        line = self._history.add_evaluation(record)
        if line is not None:
            self._console.print(line, markup=False, soft_wrap=True)


class LiveReporter(SilentReporter):
    """A table that stays in place; what others print meanwhile scrolls above it."""

    def __init__(self, console: Console, steps: int | None, shown: Shown = SHOWN) -> None:
        self._console = console
        self._history = History(steps, shown)
        self._began = self._last = time.monotonic()
        self._stage = "starting"
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def stage(self, doing: str) -> None:
        self._stage = doing

    def step(self, record: dict[str, Any]) -> None:
        self._history.add(record)
        self._last = time.monotonic()
        self._stage = ""
        self.evaluation(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        line = self._history.add_evaluation(record)
        if line is not None:
            self._console.print(line, markup=False, soft_wrap=True)
        self._live.refresh()

    def _render(self) -> Group:
        history = self._history
        lines = [Text(f"{self._stage} …")] if self._stage else []
        lines += [Text(f"{history.shown[0][1]} {sparkline(history.curve)}")] if history.curve else []
        return Group(self._progress(), self._table(), *lines)

    def _progress(self) -> Table:
        history, now = self._history, time.monotonic()
        line = Table.grid(padding=(0, 2))
        cells: list[Any] = [f"step {history.place}"]
        if history.steps is not None:
            cells.append(ProgressBar(history.steps, completed=history.last.get("step", 0), width=40))
        cells.append(f"{duration(now - self._began)} elapsed, {duration(now - self._last)} in this step")
        if history.left_s is not None:
            cells.append(f"{duration(history.left_s - (now - self._last))} left")
        line.add_row(*cells)
        return line

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2), show_edge=False)
        shown = self._history.shown
        for _, heading, _ in shown:
            table.add_column(heading, justify="right")
        record = self._history.last
        table.add_row(*(shape.format(record[key]) if key in record else "-" for key, _, shape in shown))
        return table


Sink = SilentReporter | TensorBoardSink | WandbSink


class Reporters(SilentReporter):
    """Several reporters as one. They get records without numbers that are not finite."""

    def __init__(self, reporters: Sequence[Sink]) -> None:
        self._reporters = reporters
        self._stack = ExitStack()

    def __enter__(self) -> Reporters:
        for reporter in self._reporters:
            self._stack.enter_context(reporter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def stage(self, doing: str) -> None:
        for reporter in self._reporters:
            reporter.stage(doing)

    def step(self, record: dict[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.step(finite(record))

    def evaluation(self, record: dict[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.evaluation(finite(record))


def make_reporter(
    mode: Literal["auto", "plain", "none"],
    steps: int | None,
    *,
    tensorboard: Path | None = None,
    wandb: WandbRun | None = None,
    console: Console | None = None,
    shown: Shown = SHOWN,
) -> Reporters:
    """A `loop.Reporter` and context manager. auto: live on a terminal, else plain. Shows on stderr.

    `tensorboard` = the folder for event files, `wandb` = where to log; raises ConfigError when the package of one is not
    installed.
    """
    console = console or Console(stderr=True, highlight=False)
    screen: SilentReporter = SilentReporter()
    if mode == "auto" and console.is_terminal:
        screen = LiveReporter(console, steps, shown)
    elif mode != "none":
        screen = PlainReporter(console, steps, shown)
    sinks: list[Sink] = [screen]
    if tensorboard is not None:
        sinks.append(TensorBoardSink(tensorboard))
    if wandb is not None:
        sinks.append(WandbSink(wandb))
    return Reporters(sinks)
