"""The calculator task: its data, its tool, its reward."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from agentrl.envs.calculator_math import CalculatorMath, CalculatorTasks, last_number
from agentrl.envs.safe_arithmetic import MAX_BITS, ExpressionError, evaluate, written

from agentrl import Action, ConfigError
from agentrl.engines.hermes import tool_call


def expressions(tasks: CalculatorTasks) -> list[str]:
    return [task.row["expression"] for task in tasks]


# --- data


@pytest.mark.parametrize("options", [{}, {"level": 3, "digits": 1}, {"digits": 1, "operators": "+", "size": 50}])
def test_splits_are_disjoint_distinct_and_repeatable(options: dict[str, Any]) -> None:
    train, test = (CalculatorMath.tasks(split, **options) for split in ("train", "test"))
    tasks = [*train, *test]
    found = [task.row["expression"] for task in tasks]
    seen, held_out = set(found[: len(train)]), set(found[len(train) :])
    assert len(seen) == len(train) and len(held_out) == len(test) and not seen & held_out
    assert len({task.id for task in tasks}) == len(tasks)
    assert pickle.loads(pickle.dumps(train))[-1] == train[len(train) - 1]


def test_the_test_split_does_not_depend_on_the_train_size() -> None:
    assert expressions(CalculatorMath.tasks("test", size=7)) == expressions(CalculatorMath.tasks("test"))


def test_tasks_carry_the_right_answer() -> None:
    for level in range(1, 4):
        for task in CalculatorMath.tasks("train", level=level)[:200]:
            assert task.label == eval(task.row["expression"]) == task.row["answer"]
            assert type(task.label) is int and task.prompt == task.row["expression"] + "=?"


def test_default_prompts_are_short_and_large_spaces_are_lazy() -> None:
    assert max(len(str(task.prompt)) for task in CalculatorMath.tasks()[:500]) <= len("17*23=?")
    begun = time.monotonic()
    assert len(str(CalculatorMath.tasks("train", level=6, digits=9)[19_999].prompt)) > 30
    assert time.monotonic() - begun < 2
    with pytest.raises(IndexError):
        CalculatorMath.tasks()[20_000]


@pytest.mark.parametrize(
    "options", [{"operators": "/"}, {"operators": "++"}, {"level": 0}, {"digits": 99}, {"split": "dev"}]
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CalculatorMath.tasks(**options)


# --- the calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("17*23", 391),
        (" 2 + 3 * (4 - -1) ", 17),
        ("7/2", 3.5),
        ("8/2", 4),
        ("7//2%2", 1),
        ("2^10", 1024),
        ("3×4−5÷5", 11),
        ("-2**2", -4),
        ("2**-1", 0.5),
        (".5+.25", 0.75),
        ("(" * 90 + "1" + ")" * 90, 1),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "(1",
        "007",
        "1,000",
        "1 if 1 else 2",
        "__import__('os')",
        "a",
        "'x'*9",
        "1<2",
        "1;2",
        "1\n2",
        "...",
        "[1]",
        "1j",
        "9**9**9",
        "9**9**9**9**9",
        "10**2000",
        "(-8)**.5",
        "1/0",
        "5%0",
        "0**-1",
        "2.0**5000",
        "(" + "9" * 150 + ".0)**9",
        "-" * 100 + "1",
        "1" * 201,
        "+".join(["1"] * 90),
        "\x00",
        "١+١",
    ],
)
def test_what_is_refused_at_once(expression: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ExpressionError):
        evaluate(expression)
    assert time.monotonic() - begun < 0.1


def test_the_largest_results_can_be_written() -> None:
    assert len(written(evaluate(f"2**{MAX_BITS // 2 - 1}"))) > 600
    assert written(4.0) == "4" and written(3.5) == "3.5" and written(0.1 + 0.2) == "0.30000000000000004"
    assert written(1e20) == "1e+20"


# --- the reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("391", 391),
        ("17*23=391.", 391),
        ("17*23 = 391.0", 391),
        ("The answer is -5", -5),
        ("x=−12", -12),
        ("17-5", 5),
        ("(3)-4", 4),
        ("5 - -3", -3),
        ("1,234,567", 1234567),
        ("<think>12</think>13", 13),
        ("none", None),
        ("", None),
        ("9" * 10_000, None),
        ("-", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def played(*actions: Action, label: int = 391) -> tuple[list[Any], CalculatorMath]:
    env = CalculatorMath()
    task = next(task for task in CalculatorMath.tasks() if task.label == label)
    env.reset(options={"task": task})
    return [env.step(action) for action in actions], env


def test_an_episode_with_the_tool() -> None:
    asked = Action("", tool_calls=[tool_call("calculator", {"expression": "17*23"})])
    (first, last), _ = played(asked, Action("391"))
    assert first[0][0]["content"] == "391" and first[1] is None
    assert last[1:4] == (1.0, True, False) and last[4]["score"] == 1.0
    assert last[4]["metrics"]["used_tool"] == last[4]["metrics"]["correct"] == 1.0


def test_an_episode_without_the_tool_and_one_that_is_wrong() -> None:
    (right,), _ = played(Action("It is 391"))
    assert right[1] == 1.0 and right[4]["metrics"]["used_tool"] == 0.0
    (wrong,), _ = played(Action("392"))
    assert wrong[1] == 0.0 and wrong[4]["metrics"]["correct"] == 0.0


def test_what_the_tool_printed_earns_nothing() -> None:
    asked = Action("391", tool_calls=[tool_call("calculator", {"expression": "17*23"})])
    results, env = played(*[asked] * 4)
    assert results[-1][1:4] == (0.0, False, True)
    assert env.max_turns == 4
    results, _ = played(asked, Action("dunno"))
    assert results[-1][1] == 0.0


def test_a_bad_expression_is_an_observation_and_no_use_of_the_tool() -> None:
    (first,), _ = played(Action("", tool_calls=[tool_call("calculator", {"expression": "17*"})]))
    assert first[0][0]["content"] == "Error: ExpressionError: this is not a valid expression"
    assert first[4]["metrics"]["tool_errors/raised"] == 1 and first[4]["metrics"]["used_tool"] == 0
