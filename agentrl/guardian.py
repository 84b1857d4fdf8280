"""Ends what a local Ray cluster leaves behind when its driver is killed: `python -m agentrl.guardian SESSION_DIR`.

Most processes of a cluster end with the driver at once; Ray's own agents take minutes to see that it is gone. The guardian
sleeps on a pipe that only the driver holds. When it closes, what is left of the cluster is given GRACE_S to end, then killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 8.0
OF_A_DRIVER = "python-core-driver-"
"""What the log of a program begins with that is joined to a cluster."""


@contextmanager
def guarded(session_dir: str) -> Iterator[None]:
    """Inside, a guardian watches over this process; leaving lets it look once and end."""
    command = [sys.executable, "-m", __name__, session_dir]
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guardian.communicate()


def left_behind(session_dir: str, driver: int) -> list[psutil.Process]:
    """The session's own processes: they append to its logs. Who reads them, and drivers, this one and others that joined the
    cluster, are not.
    """
    found = []
    for process in psutil.process_iter():
        try:
            files = [Path(file.path) for file in process.open_files() if _appended(file)]
            own = [file.name for file in files if file.is_relative_to(session_dir)]
            if process.pid != driver and own and not any(name.startswith(OF_A_DRIVER) for name in own):
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or is somebody else's
            continue
    return found


def _appended(file: Any) -> bool:
    """Whether the file is open for appending; only Linux tells."""
    return file.mode == "a" if psutil.LINUX else True


def main() -> None:
    session_dir = sys.argv[1]
    driver = os.getppid()
    sys.stdin.buffer.read()
    _, alive = psutil.wait_procs(left_behind(session_dir, driver), timeout=GRACE_S)
    end_now(alive)


def end_now(processes: Iterable[psutil.Process]) -> None:
    """Kill them; some may have ended meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
