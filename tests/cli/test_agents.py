"""--agent on the command line: functions, URLs, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.registry import load_object

ROOT = Path(__file__).resolve().parents[2]
AGENT = """
    async def run(task, client):
        reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.prompt}])
        return {"reward": 0.5, "metrics": {"tokens": reply.usage.completion_tokens}}

    def not_async(task, client):
        pass
"""
CONFIGURED = ["--agent", "agent.py:run", "--env", "calculator_math"]


@pytest.fixture
def play(agentrl, models, tmp_path):
    """play("--agent", …): a rollout with random tokens; what was said."""

    def command(*argv: Any):
        engine = ["--engine", "random", "--model", models("tiny-text")]
        return agentrl("rollout", *engine, "-n", 2, "--out", tmp_path / "out.jsonl", *argv)

    return command


def test_the_ten_lines_of_the_documentation_run(play, write) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    path = write("my_agent.py", code)
    said = play("--agent", f"{path}:run", "--env", "calculator_math")
    assert said.code == 0, said.err
    assert "2 episodes" in said.out


@pytest.mark.parametrize("name", ["openai_sdk", "anthropic_sdk"])
def test_the_examples_run(play, name) -> None:
    said = play("--agent", f"{ROOT}/examples/agents/{name}.py:run", "--env", "calculator_math", "--samples", 2)
    assert said.code == 0, said.err


@pytest.mark.parametrize("name", ["openai_sdk", "anthropic_sdk"])
def test_what_the_examples_calculate(name) -> None:
    calculate = load_object(f"{ROOT}/examples/agents/{name}.py:calculate")
    good, bad = {"expression": "17*23"}, {"expression": "1/0"}
    given = (lambda value: value) if name == "anthropic_sdk" else __import__("json").dumps
    assert calculate(given(good)) == "391"
    assert all("error" in calculate(given(value)) for value in (bad, {}, [1], 5))


def test_a_reward_function_judges_an_agent(play, write, tmp_path) -> None:
    write("agent.py", AGENT)
    write("reward.py", "def grade(completion, label):\n    return {'reward': 2.0, 'score': 1.0}\n")
    data = write("data.jsonl", '{"input": "a", "label": 3}\n{"input": "b", "label": 3}\n')
    said = play("--agent", "agent.py:run", "--data.path", data, "--reward", "reward.py:grade")
    assert said.code == 0, said.err
    assert re.search(r"reward/mean +2\b", said.out) and re.search(r"score/mean +1\b", said.out)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--agent", "agent.py:not_async", "--env", "calculator_math"], "async def run(task, client)"),
        (["--agent", "agent.py:nothing", "--env", "calculator_math"], "defines no 'nothing'"),
        (["--agent", "agent.py:run", "agent.py:run", "--env", "calculator_math"], "must all be URLs"),
        (["--env", "calculator_math", "--agent.sampling", "strict"], "--agent.sampling is not used"),
        ([*CONFIGURED, "--agent.bind", "127.0.0.1"], "give HOST:PORT"),
        ([*CONFIGURED, "--agent.bind", "0.0.0.0:8100"], "--agent.token-file"),
        ([*CONFIGURED, "--agent.token-file", "nowhere"], "--agent.token-file nowhere"),
        (["--agent", "http://10.1.2.3:9000", "--env", "calculator_math"], "--agent.advertise-url"),
        (["--agent", "../executor.py:SecondOpinion", *CONFIGURED[2:], "--agent.bind", "127.0.0.1:1"], "of your own"),
    ],
)
def test_what_is_asked_wrongly_exits_with_2(play, write, tmp_path, argv, said) -> None:
    write("agent.py", AGENT)
    argv = [argument.replace("../executor.py", f"{ROOT}/examples/executor.py") for argument in argv]
    result = play(*argv)
    assert result.code == 2 and said in result.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engine", "openai:nowhere"], "openai:http://"),
        (["--engine", "openai"], "There is no engine 'openai' here"),
        (["--engine", "random", "--engine.model", "x"], "--engine.model is not used"),
        (["--engine", "openai:http://127.0.0.1:9/v1", "--engine.token-file", "nowhere"], "--engine.token-file nowhere"),
    ],
)
def test_a_model_elsewhere_is_named_rightly(agentrl, models, argv, said) -> None:
    result = agentrl("rollout", "--env", "calculator_math", "--model", models("tiny-text"), "-n", 1, *argv)
    assert result.code == 2 and said in result.err


def test_training_takes_no_engine_of_somebody_elses(agentrl) -> None:
    result = agentrl("train", "--env", "calculator_math", "--engine", "openai:http://127.0.0.1:9/v1")
    assert result.code == 2 and "There is no engine" in result.err
