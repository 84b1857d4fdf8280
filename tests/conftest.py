"""What every part of the suite shares: one local Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
