"""Who is ended when the driver of a local cluster is gone: what belongs to its session, and nobody who looks at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentrl.guardian import left_behind

HOLDS = "import sys; files = [open(path, sys.argv[1]) for path in sys.argv[2:]]; print(flush=True); sys.stdin.read()"


def holding(mode: str, *paths: Path) -> subprocess.Popen[bytes]:
    """A program with the files open."""
    command = [sys.executable, "-S", "-c", HOLDS, mode, *map(str, paths)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline()
    return program


def test_readers_editors_and_other_drivers_do_not_belong_to_a_session(tmp_path: Path) -> None:
    session, other = tmp_path / "session_1", tmp_path / "session_10"
    for folder in (session, other):
        (folder / "logs").mkdir(parents=True)
        for name in ("worker-7.err", ".worker-7.err.swp", "python-core-driver-02.log", "event.log"):
            (folder / "logs" / name).touch()
    logs = session / "logs"
    worker, driver = holding("a", logs / "worker-7.err"), holding("a", logs / "worker-7.err")
    others = [
        holding("r", logs / "worker-7.err"),
        holding("r+", logs / ".worker-7.err.swp"),
        holding("a", logs / "event.log", logs / "python-core-driver-02.log"),
        holding("a", other / "logs" / "worker-7.err"),
    ]
    try:
        assert [process.pid for process in left_behind(str(session), driver.pid)] == [worker.pid]
    finally:
        for program in (worker, driver, *others):
            program.communicate()
