"""agentrl serve, and the commands that play what it serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentrl.agent_server.reward_app import reward_app
from agentrl.envs.calculator_math import CalculatorMath
from agentrl.envs.screenshot_math import ScreenshotMath

from agentrl.cli.serve_env import _sources

from ..background import background, serving_envs
from ..bad_network import restarting


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_envs({"screenshot_math": ScreenshotMath, "calculator_math": CalculatorMath}) as address:
        yield address


def lines(path: Path) -> list[dict[str, Any]]:
    """The episodes of a file, without what differs between two runs of the same thing."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    for line in read:
        for key in ("env", "time", "seconds"):
            line.pop(key, None)
    return sorted(read, key=lambda line: line["rollout_id"])


@pytest.mark.parametrize(("env", "model"), [("screenshot_math", "tiny-vlm"), ("calculator_math", "tiny-text")])
def test_rollout_plays_the_same_over_a_server(agentrl, models, url: str, env: str, model: str, tmp_path: Path) -> None:
    for name, out in ((env, "here"), (f"{url}/{env}", "there")):
        options = ["--engine", "random", "--model", models(model), "-n", 3, "--samples", 2, "--run.seed", 4]
        said = agentrl("rollout", "--env", name, *options, "--out", f"{out}.jsonl")
        assert said.code == 0, said.err
    assert lines(tmp_path / "here.jsonl") == lines(tmp_path / "there.jsonl")


def test_a_server_that_starts_again_loses_no_episode_and_counts_none_twice(
    agentrl, models, url: str, tmp_path: Path
) -> None:
    options = ["--engine", "random", "--model", models("tiny-text"), "-n", 6, "--samples", 2, "--run.seed", 4]
    with (
        serving_envs({"calculator_math": CalculatorMath}) as other,
        restarting([url, other], restarts=(30, 45, 60)) as (network, address),
    ):
        for name, out in (("calculator_math", "here"), (f"{address}/calculator_math", "there")):
            said = agentrl("rollout", "--env", name, *options, "--out", f"{out}.jsonl")
            assert said.code == 0, said.err
    assert network.faults["restart"] == 3
    assert lines(tmp_path / "here.jsonl") == lines(tmp_path / "there.jsonl")


def test_eval_measures_a_served_env(agentrl, models, url: str, tmp_path: Path) -> None:
    options = ["--engine", "random", "--model", models("tiny-text"), "--eval.tasks", 3, "--out", "result.json"]
    said = agentrl("eval", "--env", f"{url}/calculator_math", *options)
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "result.json").read_text())["tasks"] == 3


def test_show_and_check(agentrl, url: str) -> None:
    said = agentrl("envs", "show", f"{url}/calculator_math")
    assert said.code == 0, said.err
    assert "tool: calculator" in said.out and "tasks of train: 20000" in said.out
    said = agentrl("envs", "check", f"{url}/calculator_math")
    assert said.code == 0, said.out
    assert "Deterministic" in said.out


def test_options_that_a_served_env_does_not_take(agentrl, url: str) -> None:
    said = agentrl("rollout", "--env", f"{url}/calculator_math", "--engine", "random", "--env.opt", "level=2")
    assert (said.code, "agentrl serve env" in said.err) == (2, True)
    said = agentrl("rollout", "--env", "calculator_math", "--engine", "random", "--env.token-file", "x")
    assert (said.code, "--env.token-file is not used" in said.err) == (2, True)


def test_a_reward_server_judges_a_single_turn_run(agentrl, models, write, tmp_path: Path) -> None:
    data = write("data.jsonl", '{"input": "say", "label": 0.25}\n{"input": "what", "label": 0.5}\n')

    def judge(completions: list[str], labels: list[float]) -> Any:
        return [
            {"reward": label, "metrics": {"letters": len(text)}}
            for text, label in zip(completions, labels, strict=True)
        ]

    with background(reward_app(judge)) as address:
        options = ["--data.path", data, "--data.label-key", "label", "--reward", address, "--engine", "random"]
        said = agentrl("rollout", *options, "--model", models("tiny-text"), "-n", 4, "--out", "out.jsonl")
    assert said.code == 0, said.err
    played = lines(tmp_path / "out.jsonl")
    assert sorted(line["total_reward"] for line in played) == [0.25, 0.25, 0.5, 0.5]
    assert all("letters" in line["metrics"] for line in played)


def test_a_reward_server_that_is_not_there_is_known_at_once(agentrl, write, url: str) -> None:
    data = write("data.jsonl", '{"input": "say"}\n')
    for address, message in (("http://127.0.0.1:9", "no reward server answers"), (url, "is no reward server")):
        said = agentrl("rollout", "--data.path", data, "--reward", address, "--engine", "random")
        assert (said.code, message in said.err, "--reward" in said.err) == (2, True, True)


def test_options_of_one_of_several_served_envs() -> None:
    specs = ["calculator_math", "screenshot_math"]
    options = [source.options for source in _sources(specs, ["screenshot_math:level=easy"])]
    assert options == [{}, {"level": "easy"}]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["policies"], "no server 'policies'"),
        (["env", "no_such_env"], "no env named"),
        (["env", "calculator_math", "--host", "0.0.0.0"], "--token-file"),
        (["env", "calculator_math", "--port", "99999"], "--port 99999"),
        (["env", "calculator_math", "--lease", "0"], "--lease"),
        (["env", "calculator_math", "calculator_math"], "one name"),
        (["env", "calculator_math", "--env.opt", "nonsense=1"], "nonsense"),
        (["env", "calculator_math", "screenshot_math", "--env.opt", "other:level=easy"], "other:level"),
        (["env", "broken.py:Broken"], "no display"),
        (["reward", "--fn", "broken.py:Broken"], "--fn"),
        (["reward", "--fn", "broken.py:none"], "no 'none'"),
    ],
)
def test_servers_that_cannot_start(agentrl, write, argv: list[str], message: str) -> None:
    write(
        "broken.py",
        """
        from agentrl import Env

        class Broken(Env):
            def __init__(self):
                raise ValueError("no display")
        """,
    )
    said = agentrl("serve", *argv)
    assert said.code == 2
    assert message in said.err


@pytest.mark.slow
def test_the_program_serves_until_a_signal_and_closes_its_envs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl import Env\n"
        "class Mine(Env):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'hello', {}\n"
        "    def step(self, action):\n"
        "        return '', 1.0, True, False, {}\n"
        "    def close(self):\n"
        "        open('closed', 'a').write('x')\n"
    )
    (tmp_path / "token").write_text("sesame")
    command = [str(Path(sys.executable).with_name("agentrl")), "serve", "env", "mine.py:Mine", "--port", "0"]
    command += ["--token-file", "token"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "serving Mine\n"
        address = server.stdout.readline().split()[-1]
        request = urllib.request.Request(
            f"{address}/v1/sessions", b'{"env": "Mine"}', {"Authorization": "Bearer sesame"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.load(reply)["observation"] == "hello"
        assert (tmp_path / "closed").read_text() == "x", "the one looked at when the server started"
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=60)
    finally:
        server.kill()
    assert (tmp_path / "closed").read_text() == "xx"
    assert "sesame" not in "".join(said)
    assert server.returncode == 130
