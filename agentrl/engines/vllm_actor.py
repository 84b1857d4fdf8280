"""The vLLM engine in a Ray actor, and the handle through which everyone else uses it as an `Engine`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from ..engine import Generation, GenerationRequest, Health, Memory, PauseMode
from ..errors import AgentRLError, EngineError
from ..messages import ToolCall
from ..object_store import sent
from .vllm_options import VLLMOptions, environment
from .weights import WeightSource

MAX_CONCURRENCY = 16384


class VLLMActor:
    """One engine in a process of its own. Cancelling a call here ends the request in vLLM."""

    def __init__(self, options: VLLMOptions, version: int) -> None:
        # multiprocessing imports the parent's main module first in every child: ours instead of Ray's worker program.
        sys.modules["__main__"].__spec__ = importlib.util.find_spec("agentrl.engines.vllm_child")
        self._options = options
        self._version = version

    @property
    def version(self) -> int:
        return self._engine.version

    async def start(self) -> None:
        """Load vLLM and the model. Called once, before anything else."""
        from .vllm import launch

        try:
            self._engine = await launch(self._options, self._version)
        except AgentRLError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._engine.generate(request)

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return await self._engine.parse(text, tools)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        await self._engine.update_weights(source, version)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self, memory: Memory) -> None:
        await self._engine.wake(memory)

    async def health(self) -> Health:
        return await self._engine.health()

    async def shutdown(self) -> None:
        self._engine.shutdown()


class NoAnswerError(EngineError):
    """A call was given up: nobody knows whether it was done."""


class RayEngine:
    """An `Engine` that lives in a `VLLMActor`; picklable, any number of copies in any process.

    `version` is the newest this copy has seen, in its own updates, health checks and generations. Every failure of the actor or
    on the way to it is an EngineError, but for a request that does not fit into Ray's object store. Cancelling a call cancels
    it in the actor too.
    """

    def __init__(
        self,
        actor: Any,
        version: int,
        health_timeout_s: float = 10.0,
        control_timeout_s: float = 330.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.actor = actor
        self.version = version
        self._start_timeout_s = start_timeout_s
        self._health_timeout_s = health_timeout_s
        self._control_timeout_s = control_timeout_s
        self._deaf = ""

    async def start(self) -> None:
        """Load the model and wait until the engine answers, at most `start_timeout_s`. Raises EngineError."""
        try:
            await _call(self.actor.start.remote(), self._start_timeout_s)
        except BaseException:
            ray.kill(self.actor)
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises StoreFullError besides, when Ray has no room for the request's pictures."""
        reference = sent(self.actor.generate.remote, "the pictures of a request", request)
        generation: Generation = await _call(reference)
        self.version = max([self.version, *(span.version for span in generation.version_spans)])
        return generation

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return await _call(self.actor.parse.remote(text, tools))

    async def pause(self, mode: PauseMode) -> None:
        """Bounded, except that "wait" takes as long as what runs."""
        await self._order(self.actor.pause.remote(mode), None if mode == "wait" else self._control_timeout_s)

    async def resume(self) -> None:
        await self._order(self.actor.resume.remote(), self._control_timeout_s)

    async def update_weights(self, source: WeightSource, version: int) -> None:
        await self._order(self.actor.update_weights.remote(source, version), self._control_timeout_s)
        self.version = version

    async def sleep(self) -> None:
        await self._order(self.actor.sleep.remote(), self._control_timeout_s)

    async def wake(self, memory: Memory) -> None:
        await self._order(self.actor.wake.remote(memory), self._control_timeout_s)

    async def _order(self, reference: Any, timeout_s: float | None) -> None:
        """A call after which the engine is in another state; not answered in time, it is ill from now on, here at once."""
        try:
            await _call(reference, timeout_s)
        except NoAnswerError as error:
            self._deaf = str(error)
            raise

    async def health(self) -> Health:
        """Never raises and never waits longer than `health_timeout_s`: a dead or deaf engine is `ok=False`."""
        if self._deaf:
            return Health(False, self.version, detail=self._deaf)
        try:
            health: Health = await _call(self.actor.health.remote(), self._health_timeout_s)
        except EngineError as error:
            return Health(False, self.version, detail=str(error), answered=False)
        self.version = max(self.version, health.version)
        return health

    def kill(self) -> None:
        """End the actor's process without asking; what it started ends with it."""
        ray.kill(self.actor)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the engine's processes: asked first, killed when that takes too long or fails."""
        try:
            await _call(self.actor.shutdown.remote(), timeout_s)
        except EngineError:
            pass
        finally:
            ray.kill(self.actor)


def spawn_engine(
    options: VLLMOptions,
    version: int = 0,
    *,
    actor_options: Mapping[str, Any] | None = None,
    kind: type = VLLMActor,
) -> RayEngine:
    """The handle of a new engine on the connected Ray cluster; it answers after `await engine.start()`.

    `actor_options` are Ray's (name, num_cpus, num_gpus, scheduling_strategy, …) and win over the defaults. `kind` is made
    with (options, version) in a process of its own: an Engine that has `start` and `shutdown` as well.
    """
    defaults: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": options.devices if options.device == "gpu" else 0,
        "max_concurrency": MAX_CONCURRENCY,
        "runtime_env": {"env_vars": environment(options)},
    }
    actor = ray.remote(kind).options(**defaults | dict(actor_options or {})).remote(options, version)
    return RayEngine(
        actor,
        version,
        control_timeout_s=options.update_timeout_s + 30.0,
        start_timeout_s=options.start_timeout_s,
    )


async def start_engine(
    options: VLLMOptions, version: int = 0, *, actor_options: Mapping[str, Any] | None = None
) -> RayEngine:
    """`spawn_engine`, and wait until it answers. Raises EngineError."""
    engine = spawn_engine(options, version, actor_options=actor_options)
    await engine.start()
    return engine


async def _call(reference: Any, timeout_s: float | None = None) -> Any:
    """Await an actor call; given up here, it is cancelled there. Ray's errors and the timeout become EngineErrors."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except TaskCancelledError as error:
        raise EngineError("the engine call was cancelled in the engine") from error
    except RayTaskError as error:
        if isinstance(error.cause, AgentRLError):
            raise error.cause from None
        raise EngineError(f"the engine call failed: {error.cause!r}") from error
    except TimeoutError as error:
        ray.cancel(reference)
        raise NoAnswerError(f"the engine actor did not answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise EngineError(f"the engine actor is gone: {str(error).splitlines()[0]}") from error
    except RayError as error:
        raise EngineError(f"the engine call failed: {error}") from error
