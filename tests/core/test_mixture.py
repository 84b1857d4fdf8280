"""Several environments in one run: draws by weight, through a checkpoint and back, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import ConfigError, Task
from agentrl.assemble import EnvSource, make_executor
from agentrl.config import Config
from agentrl.config.checks import check_sources
from agentrl.preflight import evaluated_tasks, held_out_tasks
from agentrl.rollout.mixture import make_source

SIZES = {"a": 5, "b": 40, "c": 3}


def config(*, seed: int = 0, weights: tuple[float, ...] = (), **rollout: Any) -> Config:
    env = {"name": list(SIZES), "weights": list(weights)}
    return Config.model_validate({"run": {"seed": seed}, "env": env, "rollout": rollout})


def make(config: Config, streams: Iterable[str] = ()) -> Any:
    listed = {name: [Task(f"{name}{i}", env="overwritten") for i in range(size)] for name, size in SIZES.items()}
    return make_source(config, {name: iter(tasks) if name in streams else tasks for name, tasks in listed.items()})


def through_json(source: Any, config: Config) -> Any:
    resumed = make(config)
    resumed.restore(json.loads(json.dumps(source.state())))
    return resumed


def test_draws_follow_the_weights_and_each_environment_goes_through_its_own_tasks() -> None:
    source = make(config(weights=(1, 2, 5)))
    tasks = [source.at(draw) for draw in range(4000)]
    shares = Counter(task.env for task in tasks)
    assert [round(shares[name] / 4000, 1) for name in SIZES] == [0.1, 0.2, 0.6]
    for name, size in SIZES.items():
        ids = [task.id for task in tasks if task.env == name]
        assert all(
            set(ids[i : i + size]) == {f"{name}{k}" for k in range(size)} for i in range(0, len(ids) - size, size)
        )
        assert ids[:size] != ids[size : 2 * size] or size < 4  # each pass in an order of its own


def test_equal_weights_where_none_are_given_and_another_seed_draws_others() -> None:
    one, other = make(config()), make(config(seed=1))
    drawn = [one.at(draw).env for draw in range(3000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())
    assert drawn != [other.at(draw).env for draw in range(3000)]


@settings(deadline=None)
@given(stops=st.sets(st.integers(1, 59), max_size=4), retire=st.integers(0, 2), seed=st.integers(0, 3))
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(stops: set[int], retire: int, seed: int) -> None:
    """Also where tasks retire, and for draws issued again after the resume."""
    run = config(seed=seed, retire_after=retire)

    def played(stops: set[int]) -> Iterator[tuple[str, str] | None]:
        source = make(run)
        for draw in range(60):
            if draw in stops:
                source.forget({draw - 1, draw - 3})
                again = source.at(draw - 1)
                source = through_json(source, run)
                assert source.at(draw - 1) == again
            task = source.at(draw)
            if task is not None:
                source.note(draw, [1.0, float(len(task.id) % 2)])
            yield None if task is None else (task.env, task.id)

    assert list(played(stops)) == list(played(set()))


def test_an_environment_that_has_ended_leaves_the_others_the_draws() -> None:
    source = make(config(), streams=SIZES)
    tasks = [source.at(draw) for draw in range(sum(SIZES.values()) + 2)]
    assert tasks[-2:] == [None, None]
    assert Counter(task.env for task in tasks if task is not None) == SIZES


ENVS = """
from agentrl import Env, Task
class Add(Env):
    def __init__(self, level="easy"): self.level = level
    @classmethod
    def tasks(cls, split, count=3): return [Task(f"{split}-{i}") for i in range(count)]
class Sub(Env):
    @classmethod
    def tasks(cls, split): return [Task(f"{split}-{i}") for i in range(9)]
"""


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    (tmp_path / "two.py").write_text(ENVS)
    return [f"{tmp_path}/two.py:Add", f"{tmp_path}/two.py:Sub"]


def test_options_are_for_all_or_for_one_by_its_short_name(pair: list[str]) -> None:
    two = Config.model_validate({"env": {"name": pair, "opt": ["Add:level=hard", f"{pair[0]}:count=5"]}})
    check_sources(two)
    assert EnvSource(two).options == {"level": "hard", "count": 5}
    assert EnvSource(two, name=pair[1]).options == {}
    assert sorted(make_executor(two).played) == ["Add", "Sub"]  # type: ignore[attr-defined]
    few = two.model_copy(update={"eval": two.eval.model_copy(update={"tasks": 4})})
    held_out = evaluated_tasks(held_out_tasks(few), few)
    assert [(task.env, task.id) for task in held_out] == [
        *(("Add", f"test-{i}") for i in range(4)),
        *(("Sub", f"test-{i}") for i in range(4)),
    ]


def test_names_that_are_alike_stay_long() -> None:
    env = Config.model_validate({"env": {"name": ["x.py:Env", "y.py:Env"]}}).env
    assert list(env.labels.values()) == ["x.py:Env", "y.py:Env"]
    one = Config.model_validate({"env": {"name": "x.py:Env", "opt": ["x.py:Env:a=1:2"]}}).env
    assert (one.labels, one.opt_of("x.py:Env")) == ({"x.py:Env": "x.py:Env"}, ["a=1:2"])


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"name": ["a", "a"]}, "--env a is given twice"),
        ({"name": ["a", "b"], "weights": [1.0]}, "gives 1 weights for 2 environments"),
        ({"name": ["a", "b"], "weights": [1.0, 0.0]}, "must be above 0"),
        ({"name": "a", "weights": [1.0]}, "env.weights is not used without several"),
        ({"name": ["add", "sub"], "opt": ["ad:level=1"]}, "ad is no --env of this run. Did you mean add?"),
        ({"name": ["http://h:1/x", "a"], "opt": ["k=1"]}, "env.opt is not used with --env http://h:1/x"),
    ],
)
def test_what_cannot_be_is_refused(env: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        check_sources(Config.model_validate({"env": env}))


def test_a_dataset_is_for_one_environment() -> None:
    with pytest.raises(ConfigError, match="tasks of one environment"):
        check_sources(Config.model_validate({"env": {"name": ["a", "b"]}, "data": {"path": "d.jsonl"}}))
