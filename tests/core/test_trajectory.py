"""Rows: every sampled token of a delivered generation is trained once, where and after what it was sampled."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Generation, Node, Span, Task, Trajectory


def generation(ids: list[int], versions: list[int] | None = None, reason: str = "stop") -> Generation:
    from agentrl.engines.scripted import spans_of

    return Generation(
        tuple(ids), tuple(-i / 8 for i in ids), spans_of(versions if versions is not None else [0] * len(ids)), reason
    )


@dataclass
class Sampled:
    """What the model remembers of one generation: the context it saw, what it wrote, what it was given for it."""

    context: list[int]
    ids: list[int]
    versions: list[int]
    reward: float | None
    node: Node


@dataclass
class Agent:
    """An agent that extends, rewrites and branches, and remembers each context at the time of sampling."""

    trajectory: Trajectory = field(default_factory=lambda: Trajectory(Task("t")))
    contexts: list[tuple[Node | None, list[int], list[tuple[str, int, int]]]] = field(
        default_factory=lambda: [(None, [], [])]
    )
    delivered: list[Sampled] = field(default_factory=list)
    next_id: int = 1

    def fresh_ids(self, n: int) -> list[int]:
        self.next_id += n
        return list(range(self.next_id - n, self.next_id))

    def say(self, at: int, n: int, image: bool) -> None:
        node, ids, slots = self.contexts[at % len(self.contexts)]
        new = self.fresh_ids(n + 2 * image)
        own = [(f"sha{new[n]}", n, 2)] if image else []
        node = self.trajectory.add(node, "user", new, own)
        placed = [(sha, len(ids) + start, count) for sha, start, count in own]
        self.contexts.append((node, ids + new, slots + placed))

    def sample(self, at: int, versions: list[int], reason: str, reward: float | None) -> None:
        node, ids, slots = self.contexts[at % len(self.contexts)]
        new = self.fresh_ids(len(versions))
        node = self.trajectory.add_sampled(node, generation(new, versions, reason))
        node.reward = reward
        self.contexts.append((node, ids + new, slots))
        if reason != "abort" and new:
            self.delivered.append(Sampled(ids, new, versions, reward, node))


_SAY = st.tuples(st.just("say"), st.integers(0, 30), st.integers(0, 3), st.booleans())
_SAMPLE = st.tuples(
    st.just("sample"),
    st.integers(0, 30),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(["stop", "length", "abort"]),
    st.one_of(st.none(), st.sampled_from([0.0, 1.0, -2.5, math.nan, math.inf])),
)


def run(actions: list[Any]) -> Agent:
    agent = Agent()
    for name, at, *rest in actions:
        # Often extend the newest context (-1), else branch from any earlier one.
        getattr(agent, name)(-1 if at % 3 else at // 3, *rest)
    return agent


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(_SAY, _SAMPLE), max_size=25))
def test_every_delivered_token_is_trained_once_in_its_own_context(actions: list[Any]) -> None:
    agent = run(actions)
    rows = agent.trajectory.rows()
    trained: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(rows):
        for t in np.flatnonzero(row.loss_mask):
            token = int(row.token_ids[t])
            assert token not in trained, "trained once"
            trained[token] = (r, int(t))
    assert set(trained) == {token for sampled in agent.delivered for token in sampled.ids}
    for sampled in agent.delivered:
        (r, start), n = trained[sampled.ids[0]], len(sampled.ids)
        row = rows[r]
        assert row.token_ids[: start + n].tolist() == sampled.context + sampled.ids, "in the context it was sampled in"
        assert row.versions[start : start + n].tolist() == sampled.versions
        assert row.logprobs[start : start + n].tolist() == [-i / 8 for i in sampled.ids]
        earned = sampled.reward if sampled.reward is not None and math.isfinite(sampled.reward) else 0.0
        assert row.rewards[start : start + n].tolist() == [0.0] * (n - 1) + [earned], "on the turn's last token"
        assert not any(sampled.ids[0] in earlier.token_ids for earlier in rows[:r]), "in the first row that holds it"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(_SAY, _SAMPLE), max_size=25))
def test_rows_are_ordered_and_end_at_their_last_sampled_token(actions: list[Any]) -> None:
    agent = run(actions)
    when = {token: i for i, sampled in enumerate(agent.delivered) for token in sampled.ids}
    written = {node.index for node in agent.trajectory.nodes if node.generation is not None}
    rows = agent.trajectory.rows()
    firsts = [when[int(row.token_ids[np.flatnonzero(row.loss_mask)[0]])] for row in rows]
    assert firsts == sorted(firsts)
    slots = {sha: (start, n) for _, _, context in agent.contexts for sha, start, n in context}
    for row in rows:
        assert row.loss_mask[-1]
        assert row.token_ids.dtype == np.int32 and row.logprobs.dtype == np.float32 and row.versions.dtype == np.int32
        assert row.rewards[~row.loss_mask].tolist() == [0.0] * int((~row.loss_mask).sum())
        for sha, start, n in row.images:
            assert slots[sha] == (start, n)
            assert sha == f"sha{row.token_ids[start]}"
        assert [start for _, start, _ in row.images] == sorted(start for _, start, _ in row.images)
    spoken = [t for node in agent.trajectory.nodes if node.index not in written for t in node.token_ids]
    for row in rows:
        said = np.isin(row.token_ids, spoken)
        assert (row.versions[said] == -1).all() and (row.logprobs[said] == 0).all() and not row.loss_mask[said].any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(_SAY, _SAMPLE), max_size=20))
def test_pickling_keeps_the_rows(actions: list[Any]) -> None:
    trajectory = run(actions).trajectory
    for before, after in zip(trajectory.rows(), pickle.loads(pickle.dumps(trajectory)).rows(), strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.loss_mask.tolist() == after.loss_mask.tolist()


def test_a_sub_agent_has_a_root_of_its_own() -> None:
    trajectory = Trajectory(Task("t"), "r", "g", "env")
    main = trajectory.add_sampled(trajectory.add(None, "prompt", [1]), generation([2]))
    trajectory.add_sampled(trajectory.add(None, "prompt", [3]), generation([4, 5], [1, 2]))
    trajectory.add_sampled(trajectory.add(main, "user", [6]), generation([7]))
    rows = trajectory.rows()
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 6, 7], [3, 4, 5]]
    assert [row.oldest_version for row in rows] == [0, 1]
    assert {(row.rollout_id, row.group_id, row.task_id, row.env) for row in rows} == {("r", "g", "t", "env")}


def test_a_shared_prefix_is_trained_in_the_oldest_branch() -> None:
    trajectory = Trajectory(Task("t"))
    first = trajectory.add_sampled(trajectory.add(None, "prompt", [1]), generation([2]))
    trajectory.add_sampled(trajectory.add(first, "user", [3]), generation([4]))
    trajectory.add_sampled(trajectory.add(first, "user", [5]), generation([6]))
    one, two = trajectory.rows()
    assert (one.token_ids.tolist(), one.loss_mask.tolist()) == ([1, 2, 3, 4], [False, True, False, True])
    assert (two.token_ids.tolist(), two.loss_mask.tolist()) == ([1, 2, 5, 6], [False, False, False, True])
    assert two.versions.tolist() == [-1, 0, -1, 0], "the behaviour policy of a shared token is known in every row"


@pytest.mark.parametrize(
    ("rewards", "total"),
    [
        ([], None),
        ([None, None], None),
        ([0.0], 0.0),
        ([None, 1.0], 1.0),
        ([0.5, 0.25], 0.75),
        ([math.nan, 1.0], 1.0),
        ([1.0, math.nan], None),
        ([1.0, -math.inf], None),
        ([1.0, None], 1.0),
    ],
)
def test_the_return_is_the_sum_of_the_rewards_given(rewards: list[float | None], total: float | None) -> None:
    trajectory = Trajectory(Task("t"))
    node: Node | None = trajectory.add(None, "prompt", [1])
    for i, reward in enumerate(rewards):
        node = trajectory.add_sampled(node, generation([i]))
        node.reward = reward
    assert trajectory.total_reward == total
    assert trajectory.score == total, "the return, unless a score was given"


def test_no_verdict_and_failure_take_score_and_return_away() -> None:
    trajectory = Trajectory(Task("t"))
    trajectory.add_sampled(None, generation([1])).reward = 1.0
    trajectory.score = 0.5
    assert (trajectory.total_reward, trajectory.score) == (1.0, 0.5)
    trajectory.score = math.nan
    assert trajectory.score == 1.0
    trajectory.withhold_verdict()
    assert (trajectory.total_reward, trajectory.score) == (None, None)
    failed = Trajectory(Task("t"))
    failed.add_sampled(None, generation([1])).reward = 1.0
    failed.error = ValueError()
    assert (failed.total_reward, failed.rows()[0].total_reward) == (None, None)


@pytest.mark.parametrize(
    "broken",
    [
        Generation((1, 2), (0.0,), (Span(0, 0, 2),), "stop"),
        Generation((1, 2), (0.0, 0.0), (Span(0, 0, 1),), "stop"),
        Generation((1, 2), (0.0, 0.0), (Span(0, 0, 1), Span(1, 0, 2)), "stop"),
        Generation((1, 2), (0.0, 0.0), (Span(0, 1, 2),), "stop"),
        Generation((1, 2), (0.0, math.nan), (Span(0, 0, 2),), "stop"),
        Generation((1,), (0.0,), (), "stop"),
    ],
)
def test_a_generation_whose_parts_do_not_fit_is_refused(broken: Generation) -> None:
    trajectory = Trajectory(Task("t"))
    with pytest.raises(ValueError):
        trajectory.add_sampled(None, broken)
    assert not trajectory.nodes


def test_a_long_episode_is_cut_and_shown_without_recursion() -> None:
    trajectory = Trajectory(Task("t"))
    node: Node | None = None
    for i in range(1500):
        node = trajectory.add_sampled(trajectory.add(node, "user", [i]), generation([i]))
    (row,) = trajectory.rows()
    assert len(row) == 3000 and row.loss_mask.sum() == 1500
    assert len(repr(node)) < 1000
    assert len(pickle.loads(pickle.dumps(trajectory)).nodes) == 3000
