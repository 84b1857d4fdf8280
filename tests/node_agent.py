"""The Node example as a process; skips where it cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NODE = Path(__file__).resolve().parents[1] / "examples" / "agents" / "node"


def missing() -> str | None:
    """Why there is no Node agent here; None = there can be one."""
    absent = [program for program in ("node", "npm") if shutil.which(program) is None]
    return f"the Node agent needs {' and '.join(absent)}" if absent else None


@contextmanager
def node_agent(folder: Path) -> Iterator[str]:
    """Installed into `folder`, and its URL."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    for name in ("package.json", "agent.mjs"):
        shutil.copy(NODE / name, folder / name)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm could not install the openai package: {done.stderr[-300:]}")
    environment = {**os.environ, "PORT": "0"}
    process = subprocess.Popen(["node", "agent.mjs"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()
