"""A cluster that does not come up in Ray's own time is started again, and nothing of the first attempt stays."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from .test_ending import processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import sys, time, psutil, ray
from agentrl.cluster import connected
from agentrl.errors import InfrastructureError
from ray._private import services

real, left = services.get_node, int(sys.argv[1])

def get_node(*given, **more):
    global left
    if left:
        left -= 1
        raise Exception("The current node timed out during startup. This could happen.")
    return real(*given, **more)

services.get_node = get_node
try:
    with connected(1):
        names = [process.name() for process in psutil.Process().children(recursive=True)]
        said = ray.get(ray.remote(lambda: 7).remote())
        time.sleep(2)
        print(names.count("gcs_server"), names.count("raylet"), said, len(ray.timeline()))
except InfrastructureError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("late", "printed"), [(1, "1 1 7 0"), (9, "Ray did not start: The current node timed out during")]
)
def test_a_cluster_that_is_late_is_started_again(late: int, printed: str, tmp_path: Path) -> None:
    """Everything is Ray's own but the answer that its node has come up. Its server keeps no record of what was called."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "AGENTRL_TEST_MARK": mark}
    command = [sys.executable, "-c", PROGRAM, str(late)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith(printed), done.stdout + done.stderr[-3000:]
    assert done.stderr.count("It is tried again.") == min(late, 2)
    assert wait_until(lambda: not processes(mark, tmp_path), 30)
