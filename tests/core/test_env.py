"""The environment contract under gymnasium, the values that travel with it, and `agentrl.env_check`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterable
from typing import Any

import gymnasium
import pytest
from agentrl.envs.calculator_math import CalculatorMath
from gymnasium.utils.env_checker import check_env
from PIL import Image as PILImage
from ray import cloudpickle

from agentrl import Action, ActionSpace, ChatSpace, Env, Image, Task, Text
from agentrl.engines.hermes import tool_call
from agentrl.env_check import Finding, bad_actions, check, check_tasks

ODD = 'What is 47+1? é\n\x00 <|im_end|> "日本" 🙂'
TASKS = [Task(f"t{i}", prompt=f"Say {i}", label=i) for i in range(5)]


class Say(Env):
    """The answer is in the question."""

    @classmethod
    def tasks(cls, split: str = "train", **options: Any) -> Iterable[Task]:
        return TASKS

    def step(self, action: Any) -> Any:
        return "", float(str(self.task.label) in action), True, False, {}


# --- values


@pytest.mark.parametrize("trip", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_action_keeps_its_attributes(trip: Any) -> None:
    action = Action(ODD, tool_calls=[tool_call("f", {"a": 1})], token_ids=[1, 2], finish_reason="length")
    for other in (trip(action), cloudpickle.loads(cloudpickle.dumps(action))):
        assert type(other) is Action and other == action
        assert (other.tool_calls, other.token_ids, other.finish_reason) == (action.tool_calls, (1, 2), "length")


def test_action_is_a_str() -> None:
    assert Action(" 5 ").strip() == "5" and type(Action("a") + "b") is str and not Action()
    assert {Action("a"): 1}["a"] == 1


def test_task_travels_with_its_label() -> None:
    task = Task("t", label={"a": [1, None]}, images=(Image(PILImage.new("RGB", (2, 2))),), row={"x": 1.5})
    assert pickle.loads(pickle.dumps(task)) == task


# --- spaces and gymnasium


def test_spaces_take_any_text() -> None:
    assert all(ChatSpace().contains(x) for x in (ODD, "", [Text("a")], [{"role": "user", "content": "a"}]))
    assert not ChatSpace().contains(None) and not ChatSpace().contains(3)
    assert ActionSpace().contains(Action(ODD)) and ActionSpace().contains("") and not ActionSpace().contains(["a"])
    assert isinstance(ActionSpace(seed=1).sample(), Action)
    assert ActionSpace(seed=1).sample() == ActionSpace(seed=1).sample()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_class", [Say, CalculatorMath])
def test_gymnasium_checks_pass(env_class: type[Env]) -> None:
    check_env(env_class(), skip_render_check=True)


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_make_wrappers_and_vectors() -> None:
    env = gymnasium.make("agentrl/calculator_math-v0", digits=1)
    observation, _ = env.reset(seed=3)
    assert env.unwrapped.options == {"digits": 1}  # type: ignore[attr-defined]
    assert observation == env.get_wrapper_attr("task").prompt
    assert env.step(str(env.get_wrapper_attr("task").label))[1] == 1.0
    env.close()
    limited = gymnasium.wrappers.TimeLimit(CalculatorMath(), max_episode_steps=2)
    limited.reset(seed=0)
    assert [limited.step("")[3] for _ in range(2)] == [False, True]
    several = gymnasium.make_vec("agentrl/calculator_math-v0", num_envs=2, vectorization_mode="sync")
    observations, _ = several.reset(seed=0)
    _, rewards, *_ = several.step(["0", "wrong"])
    assert len(observations) == 2 and len(rewards) == 2
    several.close()


# --- reset


def test_reset_takes_the_task_given_or_draws_one_by_the_seed() -> None:
    env = Say()
    assert env.reset(options={"task": TASKS[3]}) == ("Say 3", {})
    drawn = [env.reset(seed=seed)[0] for seed in range(30)]
    assert drawn == [Say().reset(seed=seed)[0] for seed in range(30)] and len(set(drawn)) > 2
    assert env.reset(seed=4)[0] == drawn[4]


def test_without_tasks_the_seed_is_the_task() -> None:
    env = Env()
    assert env.reset(seed=7) == ("", {}) and env.task == Task("7")


def test_options_reach_the_drawn_tasks() -> None:
    for seed in range(5):
        assert len(CalculatorMath(level=3, digits=1).reset(seed=seed)[0]) >= len("1+2+3+4=?")


# --- env_check


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def messages(findings: list[Finding], level: str) -> str:
    return "\n".join(finding.message for finding in findings if finding.level == level)


def test_a_sound_env_has_no_findings_but_ok() -> None:
    assert levels(check(Say, TASKS, [0, 1, 2])) == {"ok"}
    assert levels(check(CalculatorMath, CalculatorMath.tasks(), [0, 1])) == {"ok"}


class Async(Say):
    async def step(self, action: Any) -> Any:
        return super().step(action)


def test_an_async_env_is_checked_through_its_sync_view() -> None:
    assert levels(check(Async, TASKS, [0])) == {"ok"}


class Faulty(Say):
    """Raises on the empty reply, cannot be closed twice."""

    done = False

    def step(self, action: Any) -> Any:
        return "", float(action[0] == "5"), True, False, {}

    def close(self) -> None:
        if self.done:
            raise RuntimeError("already closed")
        self.done = True


def test_what_raises_becomes_an_error_that_says_where() -> None:
    findings = check(Faulty, TASKS, [0])
    errors = messages(findings, "error")
    assert "given an empty reply: IndexError" in errors and "test_env.py:" in errors
    assert "given a malformed tool call" in errors and "garbage" not in errors
    assert "a second time: RuntimeError: already closed" in messages(findings, "warning")


class Unseeded(Say):
    turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        Unseeded.turn += 1
        return [Text("look"), Image(PILImage.new("RGB", (40, 30), (Unseeded.turn % 256, 0, 0)))], {}


class Pictures(Say):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        return [Text("look"), PILImage.new("RGB", (40, 30), (seed or 0, 0, 0))], {}


def test_pictures_are_compared_by_their_pixels() -> None:
    findings = check(Pictures, TASKS, [0, 1])
    assert levels(findings) == {"ok"} and "Image sizes (width x height): 40x30." in messages(findings, "ok")
    warned = messages(check(Unseeded, TASKS, [0, 1]), "warning")
    assert "the observation of reset differs" in warned


@pytest.mark.parametrize("reward", ["1", True, float("nan")])
def test_a_reward_is_a_float_or_none(reward: Any) -> None:
    class Odd(Say):
        def step(self, action: Any) -> Any:
            return "", reward, True, False, {}

    assert "gave the reward" in messages(check(Odd, TASKS, [0]), "error")


def test_a_none_reward_is_no_finding() -> None:
    class Silent(Say):
        def step(self, action: Any) -> Any:
            return "", None, True, False, {}

    assert levels(check(Silent, TASKS, [0])) == {"ok"}


def test_an_observation_must_be_one() -> None:
    class Odd(Say):
        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            return [object()], {}

    assert "not a content part" in messages(check(Odd, TASKS, [0]), "error")


def test_a_constructor_or_tasks_that_raise_are_findings() -> None:
    def broken() -> Env:
        raise OSError("no display")

    def tasks() -> Iterable[Task]:
        yield TASKS[0]
        raise ValueError("line 2")

    errors = messages(check(broken, tasks(), [0]), "error")
    assert "reading the tasks: ValueError: line 2" in errors and "no display" in errors


class Unstable:
    def __reduce__(self) -> Any:
        return (int, (3,))


@pytest.mark.parametrize(
    ("tasks", "level", "text"),
    [
        ([Task("a"), Task("b"), Task("a")], "error", "1 task ids are used more than once, 'a' first"),
        ([Task("a", label=threading.Lock())], "error", "does not travel to a worker: TypeError"),
        ([Task("a", label=Unstable())], "error", "comes back as int, not Unstable"),
        ([{"id": "a"}], "error", "gave dict, not agentrl.Task"),
        ([], "warning", "brings no tasks"),
        (TASKS, "ok", "5 tasks looked at"),
    ],
)
def test_findings_on_tasks(tasks: Any, level: str, text: str) -> None:
    (finding,) = check_tasks(tasks)
    assert finding.level == level and text in finding.message


def test_bad_actions_are_fresh_each_time() -> None:
    assert bad_actions() == bad_actions() and len(bad_actions()["a very long reply"]) == 200_000
