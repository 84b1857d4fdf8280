"""Agent frameworks as they are, each with its example: a call, its result, an answer. All of it is one trained row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.registry import load_object

from .conftest import Stage

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ASKED, ANSWERED = call("calculator", expression="17*23"), call("final_answer", answer="391")
SEVENTEEN = Task("t", "17*23=?", label=391)


@pytest.mark.parametrize("name", ["openai_sdk", "openai_agents", "pydantic_ai_agent", "langchain_agent"])
async def test_a_call_and_an_answer_are_one_row(stage: Stage, name: str) -> None:
    run = load_object(f"{EXAMPLES}/{name}.py:run")
    record = await stage.play(run, ASKED, "It is 391", task=SEVENTEEN)
    assert stage.trained(record) == [f"{ASKED}|It is 391"] and record.total_reward == 1.0
    assert [message["content"] for message in record.messages if message["role"] == "tool"] == ["391"]
    assert (await stage.play(run, "392", task=SEVENTEEN)).total_reward == 0.0


@pytest.mark.parametrize("name", ["openai_agents", "pydantic_ai_agent", "langchain_agent"])
async def test_what_the_model_gets_wrong_is_no_error_of_the_agent(stage: Stage, name: str) -> None:
    run = load_object(f"{EXAMPLES}/{name}.py:run")
    wrong = [call("calculator", expression="1/0"), call("calculator"), call("nothing", a="b"), call("calculator"), "0"]
    record = await stage.play(run, *wrong, task=SEVENTEEN)
    replies = [text for row in stage.trained(record) for text in row.split("|")]
    assert record.total_reward == 0.0 and replies == wrong[: len(replies)] and replies


async def test_smolagents_calls_and_answers(stage: Stage) -> None:
    """It stops what is sampled at "Observation:" and writes calls into its memory as text of its own."""
    run = load_object(f"{EXAMPLES}/smolagents_agent.py:run")
    record = await stage.play(run, ASKED, ANSWERED, task=SEVENTEEN)
    assert sorted(stage.trained(record)) == sorted([ASKED, ANSWERED]) and record.total_reward == 1.0
