"""From configuration to parts: what a user's environment does wrong is told in one paragraph."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import ConfigError
from agentrl.assemble import EnvSource
from agentrl.config import Config

FILE = """
from agentrl import Env, Task
class Mine(Env):
    @classmethod
    def tasks(cls, split="train"):
        return {"train": [Task("a")]}[split]
"""


def test_tasks_that_raise_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    source = EnvSource(Config.model_validate({"env": {"name": f"{tmp_path}/mine.py:Mine"}}))
    assert [task.id for task in source.tasks("train")] == ["a"]
    with pytest.raises(ConfigError, match=r"mine.py:Mine: tasks\('test'\) raised KeyError: 'test'"):
        source.tasks("test")
