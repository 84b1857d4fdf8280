"""Input that cannot be: one sentence, whatever the user's file does."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from agentrl import ConfigError, DataError
from agentrl.assemble import EnvSource, check_servers, make_executor, make_reward, make_tasks
from agentrl.checkpoint import read_state
from agentrl.config import Config
from agentrl.config.load import validated
from agentrl.report.run_folder import RunFolder


def env_config(folder: Path, source: str) -> Config:
    file = folder / "mine.py"
    file.write_text(source)
    return Config.model_validate({"env": {"name": f"{file}:Mine"}})


def test_a_file_that_exits_when_imported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not import: SystemExit: 7"):
        EnvSource(env_config(tmp_path, "import sys\nsys.exit(7)\n"))


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise SystemExit(3)", "raised SystemExit: 3"), ("return None", "gave NoneType, no collection")],
)
def test_tasks_that_are_none(body: str, message: str, tmp_path: Path) -> None:
    source = (
        f"from agentrl import Env\nclass Mine(Env):\n    @classmethod\n    def tasks(cls, split):\n        {body}\n"
    )
    with pytest.raises(ConfigError, match=message):
        make_tasks(env_config(tmp_path, source), "train")


ENV = """
class Mine:
    def __init__(self, word, size=3): ...
    def reset(self, *, seed=None, options=None): return "say it", {}
    def step(self, action): return "", 1.0, True, False, {}
"""


def test_an_option_that_an_env_cannot_do_without(tmp_path: Path) -> None:
    config = env_config(tmp_path, ENV)
    with pytest.raises(ConfigError, match=r"needs the option 'word': --env.opt word=VALUE"):
        make_executor(config)
    given = config.model_copy(update={"env": config.env.model_copy(update={"opt": ["word=yes"]})})
    make_executor(given)


def test_a_class_that_is_no_env(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no environment: the class has no reset and step"):
        EnvSource(env_config(tmp_path, "class Mine: pass\n"))


@pytest.mark.parametrize(("section", "key"), [("train", "steps"), ("optim", "lr"), ("run", "name")])
def test_a_truth_where_something_else_belongs(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}.{key} = True: .*it should not be true or false"):
        validated(Config, {section: {key: True}}, "run.toml")


def test_a_reward_that_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("points = 3\n")
    with pytest.raises(ConfigError, match="is int, no function"):
        make_reward(f"{tmp_path}/r.py:points", None)


def test_an_empty_data_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    config = Config.model_validate({"data": {"path": str(tmp_path / "empty.jsonl")}})
    with pytest.raises(DataError, match="is empty"):
        make_tasks(config, "train")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("section", "key"), [("rollout", "temperature"), ("optim", "lr")])
def test_numbers_that_are_not_finite(section: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{section}.{key}"):
        validated(Config, {section: {key: value}}, "run.toml")


def test_a_run_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder that can be written to"):
        RunFolder.fresh(str(tmp_path / "file" / "runs"), "a")
    with pytest.raises(ConfigError, match="a name, not a path"):
        RunFolder.fresh(str(tmp_path), f"..{os.sep}a")
    assert not RunFolder.fresh(str(tmp_path / "runs"), "a").path.exists(), "nothing is made yet"


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"reissue": 3}'])
def test_a_damaged_checkpoint(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match="no checkpoint that can be read"):
        read_state(tmp_path)


async def test_agent_servers_of_which_none_listens(unused_port: int) -> None:
    urls = [f"http://127.0.0.1:{unused_port}", "http://no-such-host.invalid:1"]
    with pytest.raises(ConfigError, match="no agent server listens there"):
        await check_servers(Config.model_validate({"agent": {"name": urls}}))


async def test_one_agent_server_that_listens_is_enough(unused_port: int) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    urls = [f"http://127.0.0.1:{unused_port}", f"http://127.0.0.1:{port}"]
    await check_servers(Config.model_validate({"agent": {"name": urls}}))
    server.close()


@pytest.fixture
def unused_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
