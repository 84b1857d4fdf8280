"""The program itself: help, unknown commands, exit codes, and how little it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from agentrl.cli import envs
from agentrl.errors import ConfigError, EngineError

HEAVY = {"torch", "vllm", "ray", "deepspeed", "transformers", "datasets"}


def test_help_names_every_command(agentrl) -> None:
    said = agentrl("--help")
    assert said.code == 0
    assert all(command in said.out for command in ("train", "rollout", "eval", "envs", "init", "doctor"))


def test_nothing_given_is_a_usage_error_that_shows_the_help(agentrl) -> None:
    said = agentrl()
    assert said.code == 2 and "usage:" in said.out


def test_version(agentrl) -> None:
    assert agentrl("--version").out.startswith("agentrl 0.")


def test_an_unknown_command_names_the_nearest(agentrl) -> None:
    said = agentrl("rollouts")
    assert said.code == 2 and "Did you mean rollout?" in said.err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("c"), 2), (EngineError("e"), 1), (KeyboardInterrupt(), 130)], ids=str
)
def test_what_a_command_raises_becomes_an_exit_code_and_a_line(agentrl, monkeypatch, error, code) -> None:
    def broken(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(envs, "main", broken)
    said = agentrl("envs", "list")
    assert said.code == code
    assert said.err.startswith("agentrl: ") and said.err.count("\n") == 1
    if code != 130:
        with pytest.raises(type(error)):
            agentrl("envs", "list", "--debug")


@pytest.mark.parametrize("argv", [["--help"], ["envs", "list"], ["envs", "--help"]], ids=" ".join)
def test_little_is_loaded_and_soon(argv: list[str]) -> None:
    code = f"try:\n  import sys, json\n  from agentrl.cli.main import run\n  run({argv})\nexcept SystemExit: pass\n"
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not HEAVY & loaded
    if argv == ["--help"]:
        assert used < 0.8
