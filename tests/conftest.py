"""What every part of the suite shares: one local Ray cluster, the command line in this process, untrained tiny models."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that two workers, who share the suite by file, end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster, unless one is connected already: Ray allows a process one connection."""
    import ray

    owned = not ray.is_initialized()
    if owned:
        ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    yield
    if owned:
        ray.shutdown()


@dataclass(frozen=True)
class Said:
    """What a command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def agentrl(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """agentrl("envs", "list"): runs in a folder of its own. What tyro or argparse exits with is the code."""
    monkeypatch.chdir(tmp_path)

    def command(*argv: str) -> Said:
        capsys.readouterr()
        try:
            from agentrl.cli.main import run

            code = run([str(part) for part in argv])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return command


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """models("tiny-text"): the folder of an untrained tiny policy, made once a session."""
    from agentrl.trainers.tiny import make_tiny

    root = tmp_path_factory.mktemp("models")

    def model(kind: str) -> str:
        folder = root / kind
        return str(folder if folder.is_dir() else make_tiny(kind, folder, max_steps=0))

    return model


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """write("env.py", text): a file in the test's folder, and its path."""

    def file(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return file
