"""The scripted engine in a Ray actor, so that a whole run can be driven by a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import load_object
from .scripted import ScriptedEngine

if TYPE_CHECKING:
    from .vllm_actor import RayEngine


class ScriptedActor(ScriptedEngine):
    """`path/to/file.py:fn` is called with every GenerationRequest and gives a Reply."""

    def __init__(self, script: str, version: int = 0) -> None:
        super().__init__(load_object(script), version, record=False)

    async def start(self) -> None:
        """Answers once the script is loaded."""

    async def shutdown(self) -> None:
        """Nothing to end: the actor is the engine."""


def spawn_scripted(script: str, version: int = 0) -> RayEngine:
    """The handle of a new scripted engine on the connected cluster; it answers after `await engine.start()`."""
    import ray

    from .vllm_actor import MAX_CONCURRENCY, RayEngine

    actor = ray.remote(ScriptedActor).options(num_cpus=0, max_concurrency=MAX_CONCURRENCY).remote(script, version)
    return RayEngine(actor, version)
