"""`spare_collector`, in a process of its own, as it is for the whole of one."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from agentrl.collector import spare_collector

class Node:
    def __init__(self):
        self.own = self

old = Node()
spare_collector()
assert all(held is not old for held in gc.get_objects())
seen = weakref.ref(Node())
ends = 0
while seen() is not None and ends < 1_000_000:
    ends += 1
    Node()
print(ends)
"""


def test_what_is_loaded_is_left_alone_and_later_circles_still_end() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert 700 < int(ran.stdout) < 100_000
