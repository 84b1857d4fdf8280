"""Tasks by pass rate and the retiring of solved ones, through a checkpoint and back."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ConfigError, Task
from agentrl.rollout.curriculum import Curriculum
from agentrl.rollout.weighted import Weighted


def source(n: int = 4, *, by_pass_rate: bool = False, retire_after: int = 0, shuffle: bool = False) -> Curriculum:
    tasks = [Task(str(i)) for i in range(n)]
    return Curriculum(tasks, seed=3, shuffle=shuffle, by_pass_rate=by_pass_rate, retire_after=retire_after)


def played(tasks: Curriculum, draw: int, *scores: float) -> str:
    """The id of the draw's task, whose group then ends with these scores."""
    task = tasks.at(draw)
    assert task is not None
    tasks.note(draw, scores)
    return task.id


def again(tasks: Curriculum, **options: bool | int) -> Curriculum:
    """The same source after a resume, through JSON."""
    resumed = source(**options)  # type: ignore[arg-type]
    resumed.restore(json.loads(json.dumps(tasks.state())))
    return resumed


def test_a_task_that_is_always_solved_is_left_out_in_the_next_passes() -> None:
    tasks = source(retire_after=2)
    ids = [played(tasks, draw, *((1.0, 1.0) if draw % 4 == 1 else (0.0, 1.0))) for draw in range(8)]
    assert ids == ["0", "1", "2", "3"] * 2
    assert [played(tasks, draw, 0.0) for draw in range(8, 14)] == ["0", "2", "3"] * 2


def test_a_failure_begins_the_count_anew_and_no_verdict_says_nothing_good() -> None:
    tasks = source(1, retire_after=2)
    for draw, scores in enumerate([(1.0,), (0.0,), (1.0,), ()]):
        played(tasks, draw, *scores)
    assert tasks.at(4) is not None
    for draw in (5, 6):
        played(tasks, draw, 1.0)
    assert tasks.at(7) is None


def test_a_draw_keeps_its_task_whatever_is_learned_and_after_a_resume() -> None:
    options = {"by_pass_rate": True, "retire_after": 1}
    tasks = source(**options)
    first = [tasks.at(draw) for draw in range(6)]
    for draw in range(3):
        played(tasks, draw, 1.0, 1.0)
    assert [tasks.at(draw) for draw in range(6)] == first
    resumed = again(tasks, **options)
    resumed.forget({4, 5})
    assert [resumed.at(draw) for draw in (4, 5)] == first[4:]
    tasks.forget({4, 5})
    assert [resumed.at(draw) for draw in range(6, 30)] == [tasks.at(draw) for draw in range(6, 30)]


def test_tasks_of_middling_difficulty_come_most_often() -> None:
    tasks = source(3, by_pass_rate=True)
    for draw in range(300):
        index = int(tasks.at(draw).id)  # type: ignore[union-attr]
        scores = {0: (1.0,) * 4, 1: (0.0, 1.0, 0.0, 1.0), 2: (0.0,) * 4}[index]
        played(tasks, draw, *scores)
    counts = Counter(tasks.at(draw).id for draw in range(100, 300))  # type: ignore[union-attr]
    assert counts["1"] > 5 * max(counts["0"], counts["2"])


def test_a_task_that_never_gets_a_verdict_is_drawn_ever_less() -> None:
    tasks = source(by_pass_rate=True)
    drawn: Counter[str] = Counter()
    for draw in range(80):
        task = tasks.at(draw)
        assert task is not None
        drawn[played(tasks, draw, *(() if task.id == "0" else (0.0, 1.0)))] += 1
    assert 0 < drawn["0"] < 10
    resumed = again(tasks, by_pass_rate=True)
    assert [resumed.at(draw) for draw in range(80, 120)] == [tasks.at(draw) for draw in range(80, 120)]


def test_a_draw_that_is_played_again_counts_once_also_after_a_resume() -> None:
    tasks = source(2, retire_after=2)
    first = played(tasks, 0, 1.0)
    tasks.note(0, (1.0,))
    resumed = again(tasks, n=2, retire_after=2)
    resumed.note(0, (1.0,))
    assert [played(resumed, draw, 1.0) for draw in (1, 2)] == ["1", first]
    assert played(resumed, 3, 1.0) == "1", "the first is solved twice now, and left out"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1, exclude_max=True))
def test_a_share_of_the_whole_weight_lies_where_adding_up_leads(weights: list[float], share: float) -> None:
    choice = Weighted(len(weights), 1.0)
    for index, weight in enumerate(weights):
        choice.set(index, weight)
    found = choice.at(share)
    if found is None:
        assert not any(weights)
        return
    point, slack = share * sum(weights), 1e-9
    assert weights[found] > 0
    assert sum(weights[:found]) - slack <= point <= sum(weights[: found + 1]) + slack


def test_a_stream_has_no_pass_rates() -> None:
    with pytest.raises(ConfigError, match="retire-after"):
        Curriculum(iter([Task("a")]), seed=0, shuffle=False, by_pass_rate=False, retire_after=1)
