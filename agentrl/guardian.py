"""Ends what a local Ray cluster leaves behind when its driver is killed: `python -m agentrl.guardian SESSION_DIR`.

Most processes of a cluster end with the driver at once; Ray's own agents take minutes to see that it is gone. The guardian
sleeps on a pipe that only the driver holds. When it closes, whoever but the driver still has a file of the session open is
given GRACE_S to end, then killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GRACE_S = 8.0


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
    """Processes of this user, the driver apart, with a file of the session open."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != driver and any(file.path.startswith(session_dir) for file in process.open_files()):
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or is somebody else's
            continue
    return found


def main() -> None:
    session_dir = sys.argv[1].rstrip("/") + "/"
    driver = os.getppid()
    sys.stdin.buffer.read()
    _, alive = psutil.wait_procs(left_behind(session_dir, driver), timeout=GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
