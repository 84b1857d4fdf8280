"""What is found out about an environment before a run: its failures are the run's to count, not a stack trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import Task
from agentrl.config import Config
from agentrl.preflight import probe

ENV = '''
from agentrl import Env


class Odd(Env):
    """An env with {what}."""

    max_turns = {turns}

    def reset(self, *, seed=None, options=None):
        {reset}
'''


def config(folder: Path, *, turns: str = "4", reset: str = 'return "2+2=?", {}') -> Config:
    file = folder / "odd.py"
    file.write_text(ENV.format(what=turns, turns=turns, reset=reset))
    return Config.model_validate({"env": {"name": f"{file}:Odd"}})


async def test_an_env_is_looked_at_once(tmp_path: Path) -> None:
    facts = await probe(config(tmp_path), Task("0"))
    assert facts.opening == [{"role": "user", "content": "2+2=?"}]
    assert facts.max_turns == 4 and facts.images == 0


@pytest.mark.parametrize("turns", ['"many"', "0", "2.5", "float('nan')"])
async def test_a_turn_limit_that_is_no_whole_number_is_the_envs_failure(turns: str, tmp_path: Path) -> None:
    facts = await probe(config(tmp_path, turns=turns), Task("0"))
    assert facts.opening is None and facts.max_turns is None


@pytest.mark.parametrize("reset", ["raise RuntimeError('no display')", "return None", "return float('nan'), {}"])
async def test_a_failing_reset_is_left_to_the_run(reset: str, tmp_path: Path) -> None:
    assert (await probe(config(tmp_path, reset=reset), Task("0"))).opening is None
