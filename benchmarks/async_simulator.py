"""What asynchronous rollouts can gain: a run in simulated time, with no overhead of any kind.

    python benchmarks/async_simulator.py [--gpus 8 64 512]

A batch takes `train_s` to train, a weight update `update_s`. Every episode has a length of its own; engines play `slots` of
them at full speed, more of them share that speed. The rules are those of docs/async.md: a group holds its place from its
dispatch until the weights of the update it was trained in are out. It is written without the code it is compared with.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

P99 = 2.3263
"""Standard deviations from the median to the 99th percentile of a normal distribution."""
STEPS = 16
STALENESS = (0, 1, 2, 4)
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)


@dataclass(frozen=True)
class Run:
    """`seconds(draw)` = lengths of the group's episodes at full speed, [n], the same every time. Times are in seconds.

    `partial` = episodes go on across updates; else an update waits for all that run, and none starts meanwhile.
    `drop` = the groups that finish first are trained first, `oversample` times as many as needed are in flight, and those
    that are too old then are played again. `stamped(draw)` = when each episode's oldest token gets its version, after its
    beginning [n]; None = at once, as where every token is stamped when it is sampled.
    """

    seconds: Callable[[int], Sequence[float]]
    groups: int
    steps: int
    staleness: int
    train_s: float
    update_s: float = 0.0
    partial: bool = True
    drop: bool = False
    oversample: float = 1.0
    slots: float = math.inf
    stamped: Callable[[int], Sequence[float]] | None = None


@dataclass(frozen=True)
class Outcome:
    """`wasted` = share of the groups played that was dropped; `idle` = share of the time in which the trainer waited."""

    seconds: float
    groups_per_s: float
    wasted: float
    idle: float


@dataclass
class _Group:
    """`version` = of its oldest token, as soon as that has one."""

    version: int
    left: int
    ended: int = 0


def simulate(run: Run) -> Outcome:
    """Play `run.steps` steps."""
    return _Clock(run).play()


class _Clock:
    """A simulated run. All that runs has done the same work per second, so an episode ends when `work`, the work done by an
    episode that runs from the beginning, reaches a value known at its dispatch.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.now = self.work = self.idle = 0.0
        self.version = self.next_draw = self.played = self.dropped = self.ended = 0
        self.running: list[tuple[float, int]] = []
        self.groups: dict[int, _Group] = {}
        self.again: list[int] = []
        self.unstamped: list[tuple[float, int]] = []

    def play(self) -> Outcome:
        run = self.run
        for step in range(run.steps):
            left = (run.steps - step) * run.groups
            self._dispatch(left)
            began = self.now
            batch = self._take(left)
            self.idle += self.now - began
            for draw in batch:
                del self.groups[draw]
            self._pass(self.now + run.train_s)
            if not run.partial:
                while self.running:
                    self._next_end()
            self.now += run.update_s
            self._stamp()
            self.version += 1
        return Outcome(self.now, run.steps * run.groups / self.now, self.dropped / self.played, self.idle / self.now)

    def _dispatch(self, left: int) -> None:
        """Groups take the places that are free."""
        run = self.run
        while len(self.groups) < math.ceil(run.oversample * min((run.staleness + 1) * run.groups, left)):
            draw = heapq.heappop(self.again) if self.again else self._new()
            lengths = run.seconds(draw)
            self.groups[draw] = _Group(self.version, len(lengths))
            self.played += 1
            if run.stamped is not None:
                heapq.heappush(self.unstamped, (self.work + min(run.stamped(draw)), draw))
            for length in lengths:
                heapq.heappush(self.running, (self.work + length, draw))

    def _new(self) -> int:
        self.next_draw += 1
        return self.next_draw - 1

    def _take(self, left: int) -> list[int]:
        """The draws of the next batch, as soon as it can be trained."""
        while True:
            if self.run.drop:
                self._drop_stale()
                self._dispatch(left)
            batch = self._closable()
            if batch is not None:
                return batch
            self._next_end()

    def _closable(self) -> list[int] | None:
        if self.run.drop:
            done = [draw for draw, group in self.groups.items() if not group.left]
            batch = sorted(done, key=lambda draw: self.groups[draw].ended)[: self.run.groups]
            return batch if len(batch) == self.run.groups else None
        batch = sorted(self.groups)[: self.run.groups]
        return None if any(self.groups[draw].left for draw in batch) else batch

    def _stamp(self) -> None:
        """Before the version changes, and before it is looked at."""
        while self.unstamped and self.unstamped[0][0] <= self.work:
            draw = heapq.heappop(self.unstamped)[1]
            if draw in self.groups:
                self.groups[draw].version = self.version

    def _drop_stale(self) -> None:
        self._stamp()
        for draw, group in list(self.groups.items()):
            if not group.left and self.version - group.version > self.run.staleness:
                del self.groups[draw]
                self.dropped += 1
                heapq.heappush(self.again, draw)

    def _speed(self) -> float:
        return min(1.0, self.run.slots / max(len(self.running), 1))

    def _pass(self, until: float) -> None:
        while self.running and self.now + (self.running[0][0] - self.work) / self._speed() <= until:
            self._next_end()
        self.work += (until - self.now) * self._speed()
        self.now = until

    def _next_end(self) -> None:
        """Time goes on to the end of the next episode."""
        end = self.running[0][0]
        self.now += (end - self.work) / self._speed()
        self.work = end
        group = self.groups[heapq.heappop(self.running)[1]]
        group.left -= 1
        if not group.left:
            self.ended += 1
            group.ended = self.ended


def log_normal(median: float, tail: float, n: int, seed: int) -> Callable[[int], Sequence[float]]:
    """Lengths of the n episodes of a draw, whose 99th percentile is `tail` times their median."""
    spread = math.log(tail) / P99

    def seconds(draw: int) -> Sequence[float]:
        waits = median * np.exp(spread * np.random.default_rng([seed, draw]).standard_normal(n))
        return [float(wait) for wait in waits]

    return seconds


# ------------------------------------------------------------------ clusters


@dataclass(frozen=True)
class Job:
    """One step: `groups` x `n` episodes of `median_s` seconds when an engine is not full, which it is with `slots` episodes,
    and `train` GPU seconds for each 1024 episodes. `update_s` = the pause of a weight update.
    """

    groups: int = 128
    n: int = 8
    slots: int = 64
    median_s: float = 40.0
    tail: float = 8.0
    train: float = 800.0
    update_s: float = 2.0


def predict(job: Job, gpus: int, staleness: int, share: float, *, colocated: bool = False) -> float:
    """Episodes a second on `gpus`: `share` of them are engines and the others train, or all of them do either in turn."""
    engines = gpus if colocated else gpus * share
    trainers = gpus if colocated else gpus - engines
    run = Run(
        log_normal(job.median_s, job.tail, job.n, seed=1),
        job.groups,
        steps=STEPS,
        staleness=staleness,
        train_s=job.train * job.groups * job.n / 1024 / trainers,
        update_s=job.update_s,
        slots=job.slots * engines,
    )
    return simulate(run).groups_per_s * job.n


def best_split(job: Job, gpus: int, staleness: int) -> tuple[float, float]:
    """(episodes a second, share of the GPUs for engines) of the best of a few splits."""
    return max((predict(job, gpus, staleness, share), share) for share in SHARES)


def table(gpus: Sequence[int], job: Job) -> Iterator[dict[str, float]]:
    """One row a cluster: the synchronous run on all of it in turn, and each staleness with the best split."""
    for count in gpus:
        row = {"gpus": float(count), "in turn": predict(job, count, 0, 0.5, colocated=True)}
        for staleness in STALENESS:
            speed, share = best_split(job, count, staleness)
            row |= {f"staleness {staleness}": speed, f"engines at {staleness}": share}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512])
    for row in table(parser.parse_args().gpus, Job()):
        base = row["in turn"]
        print(f"{row['gpus']:.0f} GPUs: in turn {base:.2f} episodes/s")
        for staleness in STALENESS:
            speed, share = row[f"staleness {staleness}"], row[f"engines at {staleness}"]
            print(f"  staleness {staleness}: {speed:.2f} episodes/s ({speed / base:.2f}x), {share:.0%} of them engines")


if __name__ == "__main__":
    main()
