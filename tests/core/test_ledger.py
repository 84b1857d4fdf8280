"""The ledger and its decisions under any order of events: conservation, the staleness bound, progress."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.config import Config
from agentrl.env import Task
from agentrl.errors import DataError
from agentrl.report.read_record import read_held, write_held
from agentrl.rollout.group import Batch, Group
from agentrl.rollout.ledger import GroupLedger, HeldRollouts
from agentrl.rollout.staleness import places

from ..report.builders import episode, row

MEMBERS = 2
KINDS = ["fine"] * 6 + ["flat", "failed"]
RULES = [
    {"train": {"stale": "wait"}},
    {"train": {"stale": "wait"}, "rollout": {"mask_stale_tokens": True}},
    {"train": {"stale": "drop"}},
    {"train": {"stale": "drop"}, "rollout": {"oversample": 1.5}},
    {"train": {"stale": "drop"}, "rollout": {"order": "first_done"}},
    {"train": {"stale": "drop"}, "rollout": {"order": "first_done", "oversample": 1.5}},
    {"train": {"stale": "drop"}, "rollout": {"oversample": 2.0, "mask_stale_tokens": True}},
    {"train": {"stale": "drop"}, "rollout": {"order": "first_done", "oversample": 2.5, "mask_stale_tokens": True}},
]


def configure(rules: dict[str, Any], batch: int, staleness: int) -> Config:
    return Config.model_validate(
        {
            "train": {"batch_groups": batch, "max_staleness": staleness, **rules["train"]},
            "rollout": {"n_samples": MEMBERS, **rules.get("rollout", {})},
        }
    )


class Rollouts(RuleBasedStateMachine):
    """A run of plain values. Episodes end in any order with any verdict, sampled by any versions they lived through."""

    @initialize(
        rules=st.sampled_from(RULES),
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
        draws=st.none() | st.integers(1, 14),
        steps=st.integers(1, 6),
    )
    def begin(self, rules: dict[str, Any], batch: int, staleness: int, draws: int | None, steps: int) -> None:
        self.config = configure(rules, batch, staleness)
        self.draws = draws
        self.wanted = None if draws is not None else steps * batch
        self.recorded: Counter[tuple[int, str]] = Counter()
        self.make(0, None)

    def make(self, version: int, held: HeldRollouts | None) -> None:
        wanted = None if self.wanted is None else self.wanted - self.count("trained")
        self.ledger = GroupLedger(
            self.config,
            draws=self.draws,
            wanted=wanted,
            keep=lambda group: group.scores() != [0.5, 0.5],
            version=version,
            held=held,
        )
        self.batch: Batch | None = None
        self.fill()

    def count(self, outcome: str) -> int:
        return sum(n for (_, what), n in self.recorded.items() if what == outcome)

    def fill(self) -> None:
        while (draw := self.ledger.next_to_start()) is not None:
            assert not (self.config.train.max_staleness == 0 and self.ledger.training)
            self.ledger.start(draw, Task(str(draw)))

    def record(self, groups: list[Group]) -> None:
        self.recorded.update((group.draw, group.outcome) for group in groups)

    def running(self) -> list[Group]:
        return [group for group in self.ledger.groups if not group.finished]

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 9), kind=st.sampled_from(KINDS), age=st.integers(0, 3))
    def end_an_episode(self, which: int, kind: str, age: int) -> None:
        running = self.running()
        self.end(running[which % len(running)], kind, age)

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 9), kind=st.sampled_from(KINDS), age=st.integers(0, 3))
    def end_a_group(self, which: int, kind: str, age: int) -> None:
        running = self.running()
        group = running[which % len(running)]
        while not group.finished:
            self.end(group, kind, age)

    def end(self, group: Group, kind: str, age: int) -> None:
        """One more member ends; its first token is `age` versions old, as far as the group has lived that long."""
        sample = len(group.results)
        reward = None if kind == "failed" else 0.5 if kind == "flat" else float(sample)
        oldest = max(group.version, self.ledger.version - age)
        rows = [row(2, versions=[oldest, self.ledger.version])]
        result = episode(reward, sample=sample, rows=rows, error="EnvError" if kind == "failed" else None)
        result.draw, result.group_id = group.draw, str(group.draw)
        self.ledger.end(group, result)
        self.fill()

    @precondition(lambda self: self.batch is None and self.ledger.state().wanted != 0)
    @rule()
    def take(self) -> None:
        assume(self.try_to_take())

    def try_to_take(self) -> bool:
        if self.ledger.drop_stale():
            self.fill()
        self.batch = self.ledger.take()
        if self.batch is not None:
            self.check_batch(self.batch)
            self.record(self.batch.dropped)
        return self.batch is not None

    def check_batch(self, batch: Batch) -> None:
        train, rollout = self.config.train, self.config.rollout
        short = len(batch.groups) < train.batch_groups
        assert batch.groups and (not short or self.ledger.exhausted)
        if train.stale == "wait" and not rollout.mask_stale_tokens:
            assert all(batch.groups[-1].draw < group.draw for group in self.ledger.groups)
        for group in batch.groups:
            oldest, newest = group.versions()
            assert self.ledger.version - (newest if rollout.mask_stale_tokens else oldest) <= train.max_staleness

    @precondition(lambda self: self.batch is not None)
    @rule(updated=st.booleans())
    def settle(self, updated: bool) -> None:
        assert self.batch is not None
        self.ledger.settle(self.ledger.version + updated)
        self.record(self.batch.groups)
        self.batch = None
        self.fill()

    @precondition(lambda self: self.batch is None)
    @rule()
    def save_and_resume(self) -> None:
        """Through the file of a checkpoint, as after kill -9: what ran is gone."""
        held = self.ledger.held()
        with tempfile.TemporaryDirectory() as folder:
            write_held(Path(folder), held)
            again = read_held(Path(folder), held.next_draw, held.reissue)
        self.make(self.ledger.version, again)

    @precondition(lambda self: self.batch is None)
    @rule()
    def stop(self) -> None:
        """The run ends: nothing is left over. Then another begins."""
        groups, owed = self.ledger.abandon()
        self.record(groups)
        self.recorded.update((draw, "cancelled") for draw in owed)
        self.every_draw_is_somewhere_once()
        assert not self.ledger.groups and not self.ledger.reissue and not self.ledger.dropped
        self.recorded.clear()
        self.make(0, None)

    @invariant()
    def every_draw_is_somewhere_once(self) -> None:
        if not hasattr(self, "ledger"):
            return
        final = Counter({draw: n for (draw, what), n in self.recorded.items() if what != "stale"})
        ended = (group.draw for group in self.ledger.dropped if group.outcome != "stale")
        final.update([*ended, *(g.draw for g in self.ledger.groups), *(g.draw for g in self.ledger.training)])
        final.update(self.ledger.reissue)
        assert final == Counter(range(self.ledger.next_draw))

    @invariant()
    def no_more_than_the_places_are_held(self) -> None:
        if hasattr(self, "ledger"):
            train, held = self.config.train, len(self.ledger.groups) + len(self.ledger.training)
            assert held <= places(train.batch_groups, train.max_staleness, oversample=self.config.rollout.oversample)

    @invariant()
    def wait_never_drops(self) -> None:
        masked = hasattr(self, "ledger") and self.config.rollout.mask_stale_tokens
        if hasattr(self, "ledger") and self.config.train.stale == "wait" and not masked:
            assert not self.count("stale") and all(group.outcome != "stale" for group in self.ledger.dropped)

    @invariant()
    def something_can_happen(self) -> None:
        """A run that waits for nothing that runs can close a batch, unless it is done."""
        if not hasattr(self, "ledger") or self.batch is not None or self.running():
            return
        done = self.ledger.over or self.ledger.state().wanted == 0
        assert done or self.try_to_take() or self.running()

    def teardown(self) -> None:
        """Played to its end, the run trains what it wants, whatever happened before."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(400):
            if self.batch is not None:
                self.settle(True)
            elif self.ledger.over or self.ledger.state().wanted == 0:
                break
            elif not self.try_to_take():
                self.end(self.running()[0], "fine", 0)
        else:
            raise AssertionError(f"no end: {self.ledger.state()}")
        if self.wanted is not None:
            assert self.count("trained") == self.wanted


Rollouts.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRollouts = Rollouts.TestCase


@pytest.mark.parametrize("order", ["in_order", "first_done"])
@pytest.mark.parametrize(("oversample", "staleness", "batch"), [(1.2, 1, 4), (1.5, 2, 8), (2.0, 1, 4), (1.5, 0, 2)])
def test_no_draw_gets_too_old_for_ever(oversample: float, staleness: int, batch: int, order: str) -> None:
    """Episodes that end at once: more finish than are trained, so some are dropped in every step, but not the same ones."""
    rules = {"train": {"stale": "drop"}, "rollout": {"order": order, "oversample": oversample}}
    ledger = GroupLedger(configure(rules, batch, staleness), draws=None, wanted=None, keep=lambda group: True)
    plays: Counter[int] = Counter()
    trained: set[int] = set()

    def fill() -> None:
        while (draw := ledger.next_to_start()) is not None:
            group = ledger.start(draw, Task(str(draw)))
            assert group is not None
            plays[draw] += 1
            for sample in range(MEMBERS):
                ledger.end(group, episode(1.0, sample=sample, rows=[row(1, versions=[ledger.version])]))

    fill()
    for step in range(40):
        if step == 20:
            begun = ledger.next_draw
        while ledger.drop_stale():
            fill()
        taken = ledger.take()
        assert taken is not None
        trained |= {group.draw for group in taken.groups}
        ledger.settle(ledger.version + 1)
        fill()
    assert set(range(begun)) <= trained and max(plays.values()) <= 3


def test_what_a_checkpoint_keeps_comes_back_exactly(tmp_path: Path) -> None:
    result = episode(0.1, sample=0, rows=[row(3, versions=[1, 2, 3])], metrics={"x": 0.3})
    result.rows[0].logprobs[-1] = -0.1234567891
    result.rows[0].images = [("ab", 0, 2)]
    result.messages = [{"role": "user", "content": [{"type": "image", "sha256": "ab"}]}]
    failed = episode(None, sample=1, error="EnvError", rows=[])
    waiting, ended = Group(0, Task("t"), 2, 4, [result, failed]), Group(3, Task("u"), 1, 4, [failed], "filtered")
    write_held(tmp_path, HeldRollouts(7, (2, 5), (waiting, ended)))
    held = read_held(tmp_path, 7, (2, 5))
    first, second = held.groups
    assert (first.draw, first.n, first.version, first.outcome, second.outcome) == (0, 2, 4, "", "filtered")
    again = first.results[0]
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "rewards"):
        one, other = getattr(again.rows[0], name), getattr(result.rows[0], name)
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    assert again.rows[0].images == result.rows[0].images and again.messages == result.messages
    assert vars(first.results[1]) == vars(failed)


def test_a_checkpoint_that_lacks_episodes_is_refused(tmp_path: Path) -> None:
    """A group that is not whole would be waited for for ever, and one that is missing is a lost draw."""
    group = Group(0, Task("t"), 2, 4, [episode(0.1, sample=0, rows=[]), episode(0.2, sample=1, rows=[])])
    write_held(tmp_path, HeldRollouts(1, (), (group,)))
    file = tmp_path / "rollouts.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(DataError, match="draw 0 has 1 of 2 episodes"):
        read_held(tmp_path, 1, ())
    file.unlink()
    with pytest.raises(DataError, match=r"rollouts\.jsonl.*is missing"):
        read_held(tmp_path, 1, ())


@pytest.mark.parametrize("version", [0, 10])
def test_a_resumed_run_admits_no_more_than_a_fresh_one(version: int) -> None:
    ledger = GroupLedger(configure(RULES[0], 4, 1), draws=None, wanted=None, keep=lambda group: True, version=version)
    while (draw := ledger.next_to_start()) is not None:
        ledger.start(draw, Task(str(draw)))
    assert ledger.next_draw == 8
