"""What is installed: one name, every module of the four folders, and nothing heavy on import."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "agentrl": "agentrl",
    "envs": "agentrl/envs",
    "agent_server": "agentrl/agent_server",
    "trainers": "agentrl/trainers",
}
SHIPPED = (".py", ".typed", ".ttf", ".jinja")
HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers", "datasets")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "scripts" / "build_wheel.sh", out, sys.executable], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_agentrl_alone_with_every_module(wheel: zipfile.ZipFile) -> None:
    files = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in files} == {"agentrl"}
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    wanted = set()
    for name in listed.stdout.split():
        top, _, rest = name.partition("/")
        if name.endswith(SHIPPED) and (ROOT / name).is_file():
            wanted.add(f"{FOLDERS[top]}/{rest}")
    assert {name for name in files if name.endswith(SHIPPED)} == wanted


def test_the_wheel_holds_the_licence_of_the_font(wheel: zipfile.ZipFile) -> None:
    fonts = [name for name in wheel.namelist() if name.startswith("agentrl/envs/fonts/")]
    assert any("LICENSE" in name.upper() for name in fonts)


@pytest.mark.parametrize(
    "code", ["import agentrl", "import agentrl; agentrl.Env; agentrl.Trajectory; agentrl.ScriptedEngine"]
)
def test_import_loads_nothing_heavy(code: str) -> None:
    check = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], cwd="/", check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import agentrl

    for name in agentrl.__all__:
        assert hasattr(agentrl, name), name


@pytest.mark.parametrize("order", ["import agentrl, gymnasium", "import gymnasium, agentrl"])
def test_gymnasium_knows_the_envs_whichever_is_imported_first(order: str) -> None:
    code = f"{order}\nprint(gymnasium.make('agentrl/screenshot_math-v0').unwrapped.max_turns)"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "3"
