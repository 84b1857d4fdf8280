"""Where a run writes to disk: what the disk refuses comes out as one sentence that names it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import InfrastructureError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises InfrastructureError in the place of an OSError inside the block: a full disk, a quota, a mount that is gone."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be written: {error.strerror or error}{room(path)}.") from error


def room(path: Path) -> str:
    """How full the disk is, in brackets, where it still says so."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        usage = shutil.disk_usage(there)
    except (OSError, StopIteration):
        return ""
    return f" (its disk has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free)"
