"""screenshot_math: problems, pages, judging and the episode."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from agentrl.envs.screenshot_math import MALFORMED, ScreenshotMath
from agentrl.envs.screenshot_math_options import LEVELS, resolve
from agentrl.envs.screenshot_math_page import Attempt, draw_page
from agentrl.envs.screenshot_math_problem import draw_expression, evaluate, is_test, read_answer, turn_reward
from gymnasium.utils.env_checker import check_env
from PIL import Image as PILImage

from agentrl.env import Task
from agentrl.errors import ConfigError, DataError
from agentrl.messages import Image
from agentrl.registry import register_gymnasium


def pixels(page: PILImage.Image) -> np.ndarray:
    return np.asarray(page)


def play(replies: list[str], **reset_options: Any) -> list[tuple[Any, float, bool, bool, dict[str, Any]]]:
    """The steps of an episode on `3+4` at level tiny."""
    env = ScreenshotMath()
    env.reset(seed=0, options={"task": Task("t", label=7, row={"expression": "3+4"}), **reset_options})
    return [env.step(reply) for reply in replies]


@pytest.mark.parametrize(
    ("expression", "value"), [("3+4", 7), ("9-3", 6), ("2+3*4", 14), ("12*3-5+1", 32), ("7", 7), ("5-9", -4)]
)
def test_evaluate(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["", "3+", "3 + 4", "__import__('os')", "3**4", "2/1", "٣+١x"])
def test_evaluate_refuses_anything_else(expression: str) -> None:
    with pytest.raises(DataError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("7", 7),
        (" 12\n", 12),
        ("-3", -3),
        ("−3", -3),
        ("3+4=7", 7),
        ("Answer: 7.", 7),
        ("**7**", 7),
        ("First 3, then 4.\nThe answer is 7.", 7),
        ("", None),
        ("seven", None),
        ("7 or 8", None),
        ("7\nI am not sure", None),
        ("3.5", None),
        ("9" * 5000, None),
    ],
)
def test_read_answer(reply: str, answer: int | None) -> None:
    assert read_answer(reply) == answer


def test_turn_reward() -> None:
    assert [turn_reward(turn) for turn in (1, 2, 3)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_numbers_in_one_order(level: str) -> None:
    train = ScreenshotMath.tasks("train", level=level)[:300]
    test = ScreenshotMath.tasks("test", level=level)[:300]
    for tasks, held_out in ((train, False), (test, True)):
        for task in tasks:
            numbers = [int(n) for n in task.row["expression"].replace("-", "+").replace("*", "+").split("+")]
            assert is_test(numbers) is held_out
            assert type(task.label) is int
            assert task.label == evaluate(task.row["expression"]) >= 0


def test_every_tiny_answer_can_be_learned() -> None:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    held_out = [pair for pair in pairs if is_test(pair)]
    trained = [a + b for a, b in pairs if not is_test((a, b))]
    assert len(held_out) == 11
    assert set(trained) == set(range(19))
    assert all(trained.count(a + b) >= 4 for a, b in held_out)


def test_tasks_are_lazy_and_in_a_fixed_order() -> None:
    tasks = ScreenshotMath.tasks("train", level="full", size=10_000_000)
    assert len(tasks) == 10_000_000
    assert tasks[9_999_999] == ScreenshotMath.tasks("train", level="full", size=10_000_000)[-1]
    assert [task.id for task in tasks[:2]] == ["full/train/0", "full/train/1"]
    with pytest.raises(IndexError):
        tasks[10_000_000]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_renders_its_size(level: str) -> None:
    settings = resolve({"level": level})
    expression = draw_expression("train", 3, settings)
    fresh = draw_page(settings, expression, 1)
    wrong = draw_page(settings, expression, 1, (Attempt(11, "higher"), Attempt(123456, "lower")))
    assert fresh.mode == "RGB" and fresh.size == wrong.size == (settings.width, settings.height)
    assert np.array_equal(pixels(fresh), pixels(draw_page(settings, expression, 1)))
    assert not np.array_equal(pixels(fresh), pixels(wrong))


@pytest.mark.parametrize(
    "options",
    [
        {"level": "easy", "font": "mono", "font_size": 40, "jitter": 10, "distractors": 8},
        {"level": "full", "operands": 4, "high": 9999, "operators": ["+", "*"]},
        {"operators": "-", "high": 20, "width": 140},
        {"level": "full", "width": 56, "height": 56, "font_size": 8},
    ],
)
def test_options_render(options: dict[str, Any]) -> None:
    env = ScreenshotMath(**options)
    observation, _ = env.reset(options={"task": env.tasks("test", **options)[5]})
    assert observation[0].size == (env.settings.width, env.settings.height)


def test_the_look_follows_the_seed() -> None:
    settings = resolve({"level": "full"})
    assert not np.array_equal(pixels(draw_page(settings, "3+4", 1)), pixels(draw_page(settings, "3+4", 2)))


def test_tiny_characters_stay_in_their_cells() -> None:
    settings = resolve({})
    blank = pixels(draw_page(settings, "0+0", 0))
    for expression, columns in (("8+0", {0}), ("0+8", {2}), ("8+8", {0, 2})):
        changed = (pixels(draw_page(settings, expression, 0)) != blank).any(axis=2)
        cells = {(y // settings.cell, x // settings.cell) for y, x in np.argwhere(changed)}
        assert cells == {(1, column) for column in columns}
    assert settings.width % settings.cell == settings.height % settings.cell == 0


def test_a_wrong_answer_is_crossed_out_in_red() -> None:
    settings = resolve({})
    page = pixels(draw_page(settings, "3+4", 0, (Attempt(12, "lower"),))).astype(int)
    red = (page[..., 0] > 150) & (page[..., 1] < 80) & (page[..., 2] < 80)
    cells = {(y // settings.cell, x // settings.cell) for y, x in np.argwhere(red)}
    assert cells == {(2, 0), (2, 1)}


def test_right_at_once() -> None:
    [(_, reward, terminated, truncated, info)] = play(["7"])
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["score"], info["metrics"]) == (1.0, {"solved": 1.0, "turns": 1.0})


def test_right_at_the_second_turn() -> None:
    first, second = play(["12", "7"])
    page, hint = first[0]
    assert isinstance(page, Image) and hint == "lower"
    assert first[1:4] == (0.0, False, False)
    assert second[1:3] == (0.5, True)
    assert (second[4]["score"], second[4]["metrics"]) == (0.0, {"solved": 1.0, "turns": 2.0})


def test_wrong_to_the_end() -> None:
    steps = play(["1", "2", "3"])
    assert [step[1] for step in steps] == [0.0, 0.0, 0.0]
    assert [step[2] for step in steps] == [False, False, True]
    assert steps[-1][4]["metrics"] == {"solved": 0.0, "turns": 3.0}
    assert steps[0][0][0] != steps[1][0][0], "each wrong answer has its own screenshot"


def test_a_malformed_answer_gets_text_and_costs_a_turn() -> None:
    first, second, third = play(["what?", "", "7"])
    assert first[0] == second[0] == MALFORMED
    assert third[1:3] == (0.25, True)


def test_the_limit_given_to_reset_ends_the_episode() -> None:
    assert [step[2] for step in play(["1", "2"], max_turns=2)] == [False, True]
    assert [step[2] for step in play(["1", "2", "3"], max_turns=9)] == [False, False, True]


def test_a_task_of_ones_own_needs_only_an_expression() -> None:
    env = ScreenshotMath(level="easy")
    env.reset(seed=3, options={"task": Task("mine", row={"expression": "6*7"})})
    assert env.step("42")[1] == 1.0
    with pytest.raises(DataError, match="expression"):
        env.reset(options={"task": Task("none")})


def test_same_seed_same_episode() -> None:
    env, other = ScreenshotMath(level="full"), ScreenshotMath(level="full")
    assert env.reset(seed=5)[0] == other.reset(seed=5)[0]
    assert env.task == other.task != (env.reset(seed=6), env.task)[1]


@pytest.mark.parametrize("level", LEVELS)
def test_check_env(level: str) -> None:
    register_gymnasium()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(gymnasium.make("agentrl/screenshot_math-v0", level=level).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "tinny"}, "Did you mean tiny"),
        ({"jiter": 3}, "Did you mean jitter"),
        ({"width": "wide"}, "width must be a whole number"),
        ({"max_turns": True}, "max_turns must be"),
        ({"operators": "+/"}, "operators"),
        ({"font": "comic"}, "font is one of"),
        ({"low": 9, "high": 3}, "above high"),
        ({"high": 999}, "cells"),
    ],
)
def test_bad_options_are_explained(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ScreenshotMath(**options)


def test_bad_splits_are_explained() -> None:
    with pytest.raises(ConfigError, match="splits train and test"):
        ScreenshotMath.tasks("valid")
    with pytest.raises(ConfigError, match="widen the range"):
        ScreenshotMath.tasks("test", low=0, high=0)[0]
