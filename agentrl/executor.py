"""The executor contract: what drives one episode, and what it is given.

One executor object drives many episodes at once, in a rollout worker process, never inside an engine.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .engine import Engine, Generation, GenerationRequest, Limits, Sampling, Span
from .env import Task
from .errors import AgentError, AgentRLError, ConfigError, EngineError
from .image_store import ImageStore
from .messages import Image
from .renderer import Renderer
from .seeds import derive
from .trajectory import Trajectory


@dataclass
class RolloutContext:
    """Everything one episode may use. `seed` is the base of its sampling seeds, `env_seed` goes to `Env.reset`.

    `trajectory` is the one record of the episode; an executor fills it and returns it. `training` = sampling options that
    change the distribution are refused; `draw_task` = the env draws its own task by the seed.
    """

    engine: Engine
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    seed: int
    policy_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    env_seed: int | None = None
    rollout_id: str = ""
    group_id: str = ""
    env: str = ""
    images: ImageStore | None = None
    training: bool = True
    draw_task: bool = False
    trajectory: Trajectory | None = None
    _turn: int = 0

    def begin(self, task: Task) -> Trajectory:
        """The episode's trajectory; it survives as far as it got when the executor fails."""
        self.trajectory = Trajectory(task, self.rollout_id, self.group_id, self.env)
        return self.trajectory

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        images: Sequence[Image] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Generation:
        """Sample one turn. Every call has a seed of its own. Raises EngineError when the engine aborted it.

        A sampled image placeholder ends the sample there, with finish_reason "placeholder".
        """
        budget = self.limits.max_new_tokens if max_new_tokens is None else max_new_tokens
        sampling = replace(
            self.sampling,
            max_new_tokens=min(budget, self.limits.max_new_tokens),
            stop=self.sampling.stop if stop is None else tuple(stop),
            seed=derive(self.seed, self._turn),
        )
        request_id = f"{self.rollout_id or 'rollout'}-{self._turn}"
        self._turn += 1
        request = GenerationRequest(tuple(token_ids), sampling, tuple(images), request_id, self.group_id)
        generation = await self.engine.generate(request)
        if generation.finish_reason == "abort":
            raise EngineError(f"the engine aborted {request_id}")
        return cut_at_placeholder(generation, self.renderer.placeholder_ids)

    def keep_images(self, images: Sequence[Image]) -> None:
        """Put the pictures of an observation into the run's store, so that the trainer finds them by hash."""
        if self.images is not None:
            for image in images:
                self.images.put(image)


def cut_at_placeholder(generation: Generation, placeholder_ids: frozenset[int]) -> Generation:
    """The sample up to and with its first image placeholder; the same sample when it has none."""
    end = next((i + 1 for i, token in enumerate(generation.token_ids) if token in placeholder_ids), None)
    if end is None:
        return generation
    spans = tuple(Span(s.version, s.start, min(s.end, end)) for s in generation.version_spans if s.start < end)
    return Generation(generation.token_ids[:end], generation.logprobs[:end], spans, "placeholder")


class AgentExecutorBase:
    """Subclass this to drive episodes in a way of your own.

    `execute` plays one episode of `task` and returns `ctx.begin(task)`'s trajectory. It may run many times at once on one
    object, so keep an episode's state in local variables.
    """

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        raise NotImplementedError(f"{type(self).__name__} must define execute(task, ctx)")


async def play(executor: AgentExecutorBase, task: Task, ctx: RolloutContext) -> Trajectory:
    """One episode, failures included: the fault boundary of an episode.

    What the executor raises ends up as `trajectory.error`, with the trajectory as far as it got; errors of no class of
    ours become AgentError. ConfigError and cancellation pass.
    """
    ctx.begin(task)
    try:
        return await executor.execute(task, ctx)
    except ConfigError:
        raise
    except AgentRLError as error:
        failure: AgentRLError = error
    except (ConnectionError, TimeoutError) as error:
        failure = EngineError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    except Exception as error:
        failure = AgentError(f"{type(executor).__name__} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
    assert ctx.trajectory is not None
    ctx.trajectory.error = failure
    return ctx.trajectory


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as plain values for records and logs: class, message, retryable, traceback."""
    retryable = error.retryable if isinstance(error, AgentRLError) else False
    return {
        "class": type(error).__name__,
        "message": str(error),
        "retryable": retryable,
        "traceback": "".join(traceback.format_exception(error)),
    }


async def run_episode(
    env_or_executor: Any,
    engine: Engine,
    tokenizer_or_processor: Any,
    task: Task | None = None,
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    seed: int = 0,
) -> Trajectory:
    """Play one episode here and now, without Ray: an Env class, a factory, an env object, or an executor.

    Without a task the env draws one by the seed. A failed episode comes back with `error` set.
    """
    renderer = tokenizer_or_processor
    if not isinstance(renderer, Renderer):
        renderer = Renderer(tokenizer_or_processor)
    executor = as_executor(env_or_executor)
    limits = limits or Limits()
    sampling = sampling or Sampling(max_new_tokens=limits.max_new_tokens)
    limits = replace(limits, max_new_tokens=sampling.max_new_tokens)
    ctx = RolloutContext(
        engine, renderer, sampling, limits, seed, env_seed=seed, rollout_id=f"episode-{seed}", draw_task=task is None
    )
    return await play(executor, task if task is not None else Task(id=str(seed)), ctx)


def as_executor(env_or_executor: Any) -> AgentExecutorBase:
    """An executor as it is; an env class, factory or object in a MultiTurnExecutor."""
    from .multi_turn import MultiTurnExecutor

    if isinstance(env_or_executor, AgentExecutorBase):
        return env_or_executor
    factory: Callable[[], Any] = env_or_executor if callable(env_or_executor) else lambda: env_or_executor
    return MultiTurnExecutor(factory)
