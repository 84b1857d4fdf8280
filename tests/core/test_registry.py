"""Names, files and what is said when there is no such thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentrl
from agentrl import ConfigError, Env, register
from agentrl.registry import accepted_options, is_async_env, load_file, load_object, lookup, names, resolve_env, suggest


class One(Env):
    def step(self, action: Any) -> Any:
        return "", 1.0, True, False, {}


class Two(One):
    async def step(self, action: Any) -> Any:
        return "", 2.0, True, False, {}


@pytest.mark.filterwarnings("ignore")
def test_a_second_registration_replaces_the_first() -> None:
    register("registry_test", Two)
    register("registry_test", One)
    assert lookup("env", "registry_test") is One and resolve_env("registry_test") is One
    assert names("env").count("registry_test") == 1
    env = gymnasium.make("agentrl/registry_test-v0")
    assert isinstance(env.unwrapped, One)
    env.reset(seed=0)
    assert env.step("x")[1] == 1.0


async def test_an_async_env_is_made_without_wrappers_that_would_not_wait() -> None:
    register("registry_async", Two)
    env: Any = gymnasium.make("agentrl/registry_async-v0")
    assert type(env) is Two
    env.reset(seed=0)
    assert (await env.step("x"))[1] == 2.0


def test_a_factory_may_be_registered() -> None:
    register("registry_factory", lambda **options: One())
    assert isinstance(lookup("env", "registry_factory")(), One)
    assert not is_async_env(lambda: One())


def test_installed_envs_are_known() -> None:
    assert {"calculator_math", "screenshot_math"} <= set(names("env"))
    assert lookup("env", "calculator_math").__name__ == "CalculatorMath"


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no env named 'calculater_math'. Did you mean calculator_math.*Known: "):
        lookup("env", "calculater_math")
    assert suggest("zzz", ["add", "sub"]) == ""


def test_files_load_under_a_name_of_their_own(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(f"VALUE = {value}\n")
    first, second = (load_file(str(tmp_path / folder / "env.py")) for folder in "ab")
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert sys.modules[first.__name__] is first and first.__name__ != second.__name__


def test_what_a_file_lacks_or_raises_is_said(tmp_path: Path) -> None:
    good, bad, text = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "notes.txt"
    good.write_text("import math\nclass MyEnv: pass\n")
    bad.write_text("import no_such_module\n")
    text.write_text("hello")
    assert load_object(f"{good}:MyEnv").__name__ == "MyEnv"
    cases = {
        f"{good}:MyEn": r"defines no 'MyEn'. Did you mean MyEnv\?",
        f"{bad}:MyEnv": r"bad.py does not import: ModuleNotFoundError: No module named 'no_such_module'",
        f"{tmp_path}/none.py:MyEnv": r"There is no file .*none.py\.",
        f"{text}:MyEnv": r"notes.txt is not a Python file",
    }
    for spec, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_object(spec)
    assert not [name for name in sys.modules if name.startswith("agentrl_file_bad")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("some/env.py", "name the class too, as in some/env.py:MyEnv"),
        ("http://name:password@host/x", "no name or password"),
    ],
)
def test_specs_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_env(spec)


def test_gymnasium_ids() -> None:
    assert isinstance(resolve_env("gymnasium:agentrl/calculator_math-v0")(level=2), gymnasium.Env)
    with pytest.raises(ConfigError, match="gymnasium:NoSuch-v0"):
        resolve_env("gymnasium:NoSuch-v0")()


def test_only_the_options_a_callable_names_reach_it() -> None:
    options = {"digits": 2, "other": 1}
    assert accepted_options(lambda digits=1: None, options) == {"digits": 2}
    assert accepted_options(lambda **any_of_them: None, options) == options


def test_importing_the_core_is_cheap() -> None:
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers")
    code = f"import sys, agentrl; agentrl.ToolEnv, agentrl.sync; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert "ToolEnv" in dir(agentrl)
