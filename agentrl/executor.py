"""The executor contract: what drives one episode, and what it is given.

One executor object drives many episodes at once, in a rollout worker process, never inside an engine.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .engine import Engine, Generation, GenerationRequest, Limits, Sampling, Span
from .env import Task
from .env_calls import is_cancelled
from .env_loop import EnvLoops
from .errors import AgentError, AgentRLError, ConfigError, EngineError, EnvError, InfrastructureError, error_class
from .image_store import ImageStore
from .messages import Image, ToolCall
from .renderer import Renderer
from .seeds import derive
from .tokens import without_keys
from .trajectory import Trajectory

MOST_MESSAGE, MOST_TRACEBACK = 2000, 8000
"""Characters of an error that are kept."""


@dataclass
class RolloutContext:
    """Everything one episode may use. `seed` is the base of its sampling seeds, `env_seed` goes to `Env.reset`.

    `trajectory` is the one record of the episode; an executor fills it and returns it. `training` = sampling options that
    change the distribution are refused; `draw_task` = the env draws its own task by the seed; `env_loops` = where async
    environments run, absent: on the running event loop; `waiting_for` = the calls
    that the engine has not answered yet; `gives_up` = a call that is cancelled now is not awaited any more.
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
    env_loops: EnvLoops | None = None
    trajectory: Trajectory | None = None
    waiting_for: list[str] = field(default_factory=list)
    gives_up: bool = False
    _turn: int = 0
    _spent: int = 0

    @property
    def stage(self) -> str:
        """What the episode waits for, in words."""
        return f"waits for the engine ({', '.join(self.waiting_for)})" if self.waiting_for else "in the environment"

    def begin(self, task: Task) -> Trajectory:
        """The episode's trajectory; it survives as far as it got when the executor fails."""
        self.trajectory = Trajectory(task, self.rollout_id, self.group_id, self.env)
        return self.trajectory

    def adopt(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory an executor returned, its own or `begin`'s, under this episode's ids: baselines go by group."""
        trajectory.rollout_id, trajectory.group_id, trajectory.env = self.rollout_id, self.group_id, self.env
        return trajectory

    def budget(self, length: int, asked: int | None = None, n: int = 1) -> int:
        """Tokens that each of the next `n` turns may sample after a context of `length` tokens; at or below 0 the episode is
        over. What calls under way may still sample is taken off.
        """
        limits = self.limits
        wanted = limits.max_new_tokens if asked is None else min(asked, limits.max_new_tokens)
        return min(wanted, limits.max_len - length, (limits.total_tokens - self._spent) // n)

    def reserve(self, tokens: int) -> None:
        """Keep tokens of the episode's total for calls that begin soon; a negative number gives some back."""
        self._spent += tokens

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        images: Sequence[Image] = (),
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        sampling: Sampling | None = None,
    ) -> Generation:
        """Sample one turn, within the episode's limits. Every call has a seed of its own.

        `sampling` stands in for the episode's own. A sampled image placeholder ends the sample there, with finish_reason
        "placeholder". Raises EngineError when the engine aborted or failed it, AgentError when the limits leave no token.
        """
        budget = self.budget(len(token_ids), max_new_tokens)
        if budget <= 0:
            raise AgentError(f"{self.rollout_id}: the limits leave no token to sample after {len(token_ids)} tokens")
        sampling = sampling or self.sampling
        sampling = replace(
            sampling,
            max_new_tokens=budget,
            stop=sampling.stop if stop is None else tuple(stop),
            seed=derive(self.seed, self._turn),
        )
        request_id = f"{self.rollout_id or 'rollout'}-{self._turn}"
        self._turn += 1
        request = GenerationRequest(tuple(token_ids), sampling, tuple(images), request_id, self.rollout_id)
        generation = await self._metered(request_id, request)
        if generation.finish_reason == "abort":
            raise EngineError(f"the engine aborted {request_id}")
        if (fault := generation.fault()) is not None:
            raise EngineError(f"the engine's answer to {request_id} does not fit together: {fault}")
        return cut_at_placeholder(generation, self.renderer.placeholder_ids)

    async def _metered(self, request_id: str, request: GenerationRequest) -> Generation:
        """The engine's answer. While it is awaited, all that it may sample counts as sampled."""
        budget, sampled = request.sampling.max_new_tokens, 0
        self._spent += budget
        try:
            generation = await self._engine_call(request_id, self.engine.generate(request))
            sampled = len(generation.token_ids)
            return generation
        finally:
            self._spent += sampled - budget

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        """(content, tool calls) of what the model wrote, special tokens kept. Raises EngineError."""
        return await self._engine_call(f"{self.rollout_id}: parsing", self.engine.parse(text, tools))

    async def _engine_call(self, what: str, call: Awaitable[Any]) -> Any:
        """The fault boundary of the engine; `waiting_for` names the call until it is answered."""
        self.waiting_for.append(what)
        try:
            answer = await call
        except AgentRLError:
            self.waiting_for.remove(what)
            raise
        except asyncio.CancelledError:
            if self.gives_up:
                self.waiting_for.remove(what)
            raise
        except Exception as error:
            self.waiting_for.remove(what)
            raise EngineError(f"{what}: the engine raised {type(error).__name__}: {error}") from error
        self.waiting_for.remove(what)
        return answer

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

    `execute` plays one episode of `task` and returns its trajectory: `ctx.begin(task)`'s, which survives a failure, or one
    of its own. It may run many times at once on one object, so keep an episode's state in local variables.
    """

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        raise NotImplementedError(f"{type(self).__name__} must define execute(task, ctx)")


async def play(executor: AgentExecutorBase, task: Task, ctx: RolloutContext) -> Trajectory:
    """One episode, failures included: the fault boundary of an episode.

    What the executor raises, and an episode over its time, end up as `trajectory.error`, with the trajectory as far as it
    got; errors of no class of ours become AgentError. ConfigError and cancellation pass.
    """
    ctx.begin(task)
    bound = ctx.limits.episode_timeout_s
    try:
        async with asyncio.timeout(bound) as scope:
            trajectory = await executor.execute(task, ctx)
        if isinstance(trajectory, Trajectory):
            return ctx.adopt(trajectory)
        failure: AgentRLError = AgentError(f"{type(executor).__name__}.execute must return a Trajectory")
    except ConfigError:
        raise
    except AgentRLError as error:
        failure = error
    except (ConnectionError, TimeoutError) as error:
        failure = _over_time(ctx, bound) if scope.expired() else InfrastructureError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    except Exception as error:
        failure = AgentError(f"{type(executor).__name__} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        failure = AgentError(f"{type(executor).__name__} let a cancellation of its own escape")
        failure.__cause__ = error
    assert ctx.trajectory is not None
    ctx.trajectory.error = failure
    return ctx.trajectory


def _over_time(ctx: RolloutContext, bound: float) -> AgentRLError:
    """Who is to blame when the episode's time is up: the engine if it owes an answer, an agent that talks HTTP if one plays."""
    if ctx.waiting_for:
        return EngineError(f"no answer to {', '.join(ctx.waiting_for)} when the episode's {bound:g} s were over")
    player = EnvError if ctx.policy_url is None else AgentError
    return player(f"the episode took longer than rollout.episode_timeout_s = {bound:g} s")


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as plain values for records and logs, rollouts' keys left out: class, message, retryable, traceback."""
    retryable = error.retryable if isinstance(error, AgentRLError) else False
    return {
        "class": error_class(error),
        "message": _presentable(str(error), MOST_MESSAGE),
        "retryable": retryable,
        "traceback": _presentable("".join(traceback.format_exception(error)), MOST_TRACEBACK),
    }


def _presentable(text: str, most: int) -> str:
    """Both ends of a long text, without keys: user code may raise megabytes, in every episode."""
    text = without_keys(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {len(text) - most} characters left out … {text[-most // 2 :]}"


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

    Without a task the env draws one by the seed. A turn samples at most the smaller of the two `max_new_tokens`. A failed
    episode comes back with `error` set.
    """
    renderer = tokenizer_or_processor
    if not isinstance(renderer, Renderer):
        renderer = Renderer(tokenizer_or_processor)
    executor = as_executor(env_or_executor)
    if limits is None:
        limits = Limits() if sampling is None else Limits(max_new_tokens=sampling.max_new_tokens)
    elif sampling is not None:
        limits = replace(limits, max_new_tokens=min(limits.max_new_tokens, sampling.max_new_tokens))
    sampling = sampling or Sampling(max_new_tokens=limits.max_new_tokens)
    ctx = RolloutContext(
        engine, renderer, sampling, limits, seed, env_seed=seed, rollout_id=f"episode-{seed}", draw_task=task is None
    )
    return await play(executor, task if task is not None else Task(id=str(seed)), ctx)


def as_executor(env_or_executor: Any) -> AgentExecutorBase:
    """An executor as it is or from its class; an env class, factory or object in a MultiTurnExecutor."""
    from .multi_turn import MultiTurnExecutor

    if isinstance(env_or_executor, AgentExecutorBase):
        return env_or_executor
    if isinstance(env_or_executor, type) and issubclass(env_or_executor, AgentExecutorBase):
        return env_or_executor()
    factory: Callable[[], Any] = env_or_executor if callable(env_or_executor) else lambda: env_or_executor
    return MultiTurnExecutor(factory)
