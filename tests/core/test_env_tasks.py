"""Tasks that environments bring: whatever their code does is told in one paragraph, when they are read too."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl import ConfigError, Env, Task
from agentrl.assemble import EnvSource, make_tasks
from agentrl.config import Config
from agentrl.env_tasks import checked_tasks
from agentrl.preflight import first_opening
from agentrl.registry import load_file
from agentrl.rollout.task_source import TaskSource

PLAIN = """
from agentrl import Env, Task
class Puzzle:
    pass
class Mine(Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        if self.task.id in ("0", "1"):
            raise RuntimeError("broken task")
        return f"seed {seed}", {}
    def step(self, action):
        return "", 1.0, True, False, {}
"""


def config(folder: Path, source: str = PLAIN, name: str = "Mine") -> Config:
    file = folder / "mine.py"
    file.write_text(source)
    return Config.model_validate({"env": {"name": f"{file}:{name}"}})


def test_a_stream_that_fails_later() -> None:
    tasks = checked_tasks((Task(str(10 // (2 - i))) for i in range(9)), "mine: tasks('train')")
    with pytest.raises(ConfigError, match=r"mine: tasks\('train'\), at task 2, raised ZeroDivisionError"):
        list(tasks)


@pytest.mark.parametrize("given", [["a", "b"], iter(["a"])])
def test_what_is_no_task(given: object) -> None:
    with pytest.raises(ConfigError, match=r"gave a str \('a'\): every task must be an agentrl.Task"):
        next(iter(checked_tasks(given, "mine")))


def test_a_sequence_stays_one_and_is_not_read_through() -> None:
    class Large(Sequence[Task]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> Task:  # type: ignore[override]
            return Task(str(index))

    tasks = checked_tasks(Large(), "mine")
    assert isinstance(tasks, Sequence) and len(tasks) == 10**9 and tasks[10**8].id == str(10**8)
    assert [task.id for task in tasks[3:5]] == ["3", "4"] and tasks[-1].id == str(10**9 - 1)


def test_an_env_without_tasks_is_played_on_seeds(tmp_path: Path) -> None:
    tasks = make_tasks(config(tmp_path), "train")
    assert not isinstance(tasks, Sequence)
    assert [task.id for task in itertools.islice(tasks, 3)] == ["train-0", "train-1", "train-2"]
    assert next(iter(make_tasks(config(tmp_path), "test"))).id == "test-0"


@pytest.mark.parametrize(("gym_id", "counted"), [("agentrl/calculator_math-v0", True), ("CartPole-v1", False)])
def test_a_gymnasium_id_brings_what_its_class_brings(gym_id: str, counted: bool) -> None:
    found = make_tasks(Config.model_validate({"env": {"name": f"gymnasium:{gym_id}"}}), "train")
    assert isinstance(found, Sequence) == counted
    assert isinstance(next(iter(found)), Task)


async def test_a_task_that_does_not_open_does_not_decide_what_the_env_is_like(tmp_path: Path) -> None:
    facts = await first_opening(config(tmp_path), [Task(str(number)) for number in range(4)])
    assert facts.opening is not None and facts.opening[0]["role"] == "user"
    assert (await first_opening(config(tmp_path), [Task("0"), Task("1")])).opening is None


def test_what_a_file_defines_travels_between_processes(tmp_path: Path) -> None:
    settings = config(tmp_path)
    EnvSource(settings)
    file = tmp_path / "mine.py"
    module = load_file(str(file))
    assert module is load_file(str(file)), "loaded once"
    (tmp_path / "task").write_bytes(pickle.dumps(Task("t", label=module.Puzzle())))
    code = (
        "import pickle, sys; from agentrl.registry import load_file; load_file(sys.argv[1]); "
        "print(type(pickle.load(open(sys.argv[2], 'rb')).label).__name__)"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "task")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "Puzzle"


def test_a_file_that_changed_is_loaded_again(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert EnvSource(settings).target.max_turns == 16
    changed = PLAIN.replace("class Mine(Env):", "class Mine(Env):\n    max_turns = 3")
    assert EnvSource(config(tmp_path, changed)).target.max_turns == 3


def test_options_by_position_are_options(tmp_path: Path) -> None:
    class Guess(Env):
        def __init__(self, highest: int = 20, *, lowest: int = 1) -> None:
            pass

        @classmethod
        def tasks(cls, split: str = "train", highest: int = 20) -> list[Task]:  # type: ignore[override]
            return [Task("only", label=highest)]

    env = Guess(1000, lowest=3)
    assert env.options == {"highest": 1000, "lowest": 3}
    env.reset(seed=1)
    assert env.task.label == 1000


def test_a_stream_keeps_the_draws_that_are_alive() -> None:
    source = TaskSource((Task(str(number)) for number in itertools.count()), seed=0, shuffle=False)
    for draw in range(1000):
        task = source.at(draw)
        assert task is not None and task.id == str(draw)
        source.forget({draw, 5} if draw >= 5 else range(draw + 1))
    kept = source.at(5)
    assert kept is not None and kept.id == "5" and source.at(998) is None
    assert len(source._seen) <= 2
