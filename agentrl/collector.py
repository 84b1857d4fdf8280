"""Python's garbage collector in processes that hold many objects for long."""

from __future__ import annotations

import atexit
import gc

YOUNG = 10_000


def spare_collector() -> None:
    """For the rest of the process: what is loaded by now is not looked at again, and collections are rarer. By its own measure
    Python looks after every 700 new objects, ever again at the thousands of episodes that are in flight.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extensions report at the end what was not freed
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
