"""Ray's object store, through which large arguments and results travel between processes, and what it means that it is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import StoreFullError


def sent(call: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """`call(*arguments)`, which hands the arguments to Ray. Raises StoreFullError when there is no room for `what`."""
    from ray.exceptions import RayError

    try:
        return call(*arguments)
    except RayError as error:
        raise (no_room(what, error) or error) from error


def no_room(what: str, error: BaseException) -> StoreFullError | None:
    """The error for `what`, if Ray's says that the store is full and the disk behind it as well; else None."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    if not isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return None
    full = "is full" if isinstance(error, ObjectStoreFullError) else "and the disk behind it are full"
    return StoreFullError(
        f"no room for {what}: Ray's object store {full} on this machine. Play fewer episodes at once (--rollout.max-episodes), "
        "shrink pictures (--data.max-pixels), or free memory in /dev/shm and space in Ray's folder, /tmp/ray unless told "
        "otherwise."
    )
