"""agentrl envs: what is listed, shown, found wrong, and started from."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from PIL import Image

import agentrl as package
from agentrl import registry

ENV = """
    import time
    from agentrl import Env, Task

    class Good(Env):
        '''Says x.

        More about it.
        '''

        max_turns = 2

        def __init__(self, size: int = 3, word: str = "x"):
            self.word = word

        @classmethod
        def tasks(cls, split="train", size: int = 3):
            return [Task(f"{split}-{i}", "say x") for i in range(size if split == "train" else 0)]

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed, options=options)
            return [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"say {self.word}\\x1b[31m"}], {}

        def step(self, action):
            return "", 1.0, True, False, {}

    class Undocumented(Good):
        pass

    class Hangs(Good):
        def step(self, action):
            while True:
                time.sleep(0.1)

    class Exits(Good):
        def step(self, action):
            raise SystemExit(3)

    class Raises(Good):
        def step(self, action):
            raise ValueError("nonsense")

    class Stuck(Good):
        def reset(self, *, seed=None, options=None):
            while True:
                time.sleep(0.1)
"""


@pytest.fixture
def file(write) -> str:
    return write("my_env.py", ENV)


def test_list_shows_name_sizes_and_first_line(agentrl) -> None:
    said = agentrl("envs", "list")
    assert said.code == 0
    line = next(line for line in said.out.splitlines() if line.startswith("screenshot_math"))
    assert "train 1920, test 1920" in line and "screenshot" in line.removeprefix("screenshot_math")


def test_list_survives_an_env_that_does_not_import(agentrl, monkeypatch) -> None:
    broken = importlib.metadata.EntryPoint("broken", "no_such_module:Env", "agentrl.envs")
    found = importlib.metadata.entry_points
    monkeypatch.setattr(
        registry.importlib.metadata,
        "entry_points",
        lambda group: [*found(group=group), broken] if group == "agentrl.envs" else found(group=group),
    )
    said = agentrl("envs", "list")
    assert said.code == 0
    assert "does not import: ModuleNotFoundError" in said.out and "screenshot_math" in said.out


def test_show_says_what_there_is_to_know(agentrl, file) -> None:
    said = agentrl("envs", "show", f"{file}:Good", "--env.opt", "size=5", "word=y")
    assert said.code == 0, said.err
    for part in (
        "Says x.",
        "More about it.",
        "size = 3",
        "word = 'x'",
        "at most 2",
        "train: 5",
        "test: none",
        "train-0",
    ):
        assert part in said.out
    assert "[system]" in said.out and "be brief" in said.out and "say y" in said.out
    assert "\x1b" not in said.out


def test_show_does_not_take_a_parents_docstring(agentrl, file) -> None:
    assert "(no docstring)" in agentrl("envs", "show", f"{file}:Undocumented").out


def test_show_lists_tools_and_fields_of_settings(agentrl) -> None:
    assert "tool: calculator - Evaluate arithmetic." in agentrl("envs", "show", "calculator_math").out
    assert "level = 'easy'" in agentrl("envs", "show", "screenshot_math", "--env.opt", "level=easy").out


def test_show_writes_the_screenshots(agentrl, tmp_path) -> None:
    said = agentrl("envs", "show", "screenshot_math", "--out", tmp_path / "shots")
    with Image.open(tmp_path / "shots" / "observation_0.png") as picture:
        width, height = picture.size
    assert f"<image {width}x{height}" in said.out


def test_show_of_a_hanging_env_ends(agentrl, file) -> None:
    said = agentrl("envs", "show", f"{file}:Stuck", "--timeout", "0.3")
    assert said.code == 1 and "reset took longer than 0.3 s" in said.err


def test_check_of_good_envs(agentrl, file) -> None:
    for name in ("calculator_math", f"{file}:Good"):
        said = agentrl("envs", "check", name)
        assert said.code == 0, said.out
        assert "error" not in said.out.replace("errors", "")


def test_check_names_what_is_wrong_and_fails(agentrl, file) -> None:
    said = agentrl("envs", "check", f"{file}:Raises")
    assert said.code == 1 and "ValueError: nonsense" in said.out and "my_env.py" in said.out


def test_check_of_a_hanging_env_says_where(agentrl, file) -> None:
    said = agentrl("envs", "check", f"{file}:Hangs", "--timeout", "2")
    assert said.code == 1 and "within 2 s" in said.out and "my_env.py" in said.out and "in step" in said.out


def test_check_of_an_env_that_exits(agentrl, file) -> None:
    said = agentrl("envs", "check", f"{file}:Exits")
    assert said.code == 1 and "SystemExit" in said.out


@pytest.mark.parametrize("action", ["show", "check"])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["screenshot_mat"], "Did you mean screenshot_math?"),
        (["nowhere.py:Env"], "There is no file nowhere.py."),
        (["screenshot_math", "--env.opt", "levl=easy"], "Did you mean level"),
        (["screenshot_math", "--env.opt", "level=huge"], "no level 'huge'"),
        (["screenshot_math", "--env.opt", "level"], "KEY=VALUE"),
    ],
)
def test_bad_names_and_options_are_usage_errors(agentrl, action, argv, said) -> None:
    result = agentrl("envs", action, *argv)
    assert result.code == 2 and said in result.err


def test_a_file_that_does_not_import_shows_its_own_error(agentrl, write) -> None:
    said = agentrl("envs", "check", write("broken.py", "import no_such_module") + ":Env")
    assert said.code == 2 and "No module named 'no_such_module'" in said.err


def test_an_unknown_action_names_the_nearest(agentrl) -> None:
    said = agentrl("envs", "lst")
    assert said.code == 2 and "Did you mean list?" in said.err
    assert agentrl("envs").code == 2


def test_a_new_env_is_in_order(agentrl, tmp_path) -> None:
    said = agentrl("envs", "new", "my_game")
    assert said.code == 0 and "my_game.py:MyGame" in said.out
    checked = agentrl("envs", "check", "my_game.py:MyGame")
    assert checked.code == 0 and "warning" not in checked.out, checked.out
    env = registry.load_object(str(tmp_path / "my_game.py") + ":MyGame")()
    env.reset(options={"task": package.Task("t", "above 3", label=3)})
    assert env.step(" 4 ")[1:3] == (1.0, True)


def test_a_new_env_replaces_no_file_and_wants_a_name(agentrl, write) -> None:
    path = write("my_game.py", "precious")
    assert agentrl("envs", "new", "my_game").code == 2
    assert Path(path).read_text() == "precious"
    assert agentrl("envs", "new", "../x").code == 2
    assert agentrl("envs", "new", "x", "--out", "no/such/x.py").code == 2
