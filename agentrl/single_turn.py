"""The stock executor for prompts with a reward function: one prompt, one completion, one verdict."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .env import Task, opening
from .env_calls import EnvThread, blame_env, run_async
from .env_loop import EnvLoops
from .errors import ConfigError, EnvError
from .executor import AgentExecutorBase, RolloutContext
from .registry import accepted_options
from .reward import Verdict, check_reward, combine, read_verdict
from .trajectory import Trajectory

Reward = Callable[..., Any]


class SingleTurnExecutor(AgentExecutorBase):
    """Samples one completion of `task.prompt` and asks one or several reward functions about it.

    A reward function is called with the keywords it names among prompt, completion, label, row, images, task, and
    prompt_text, query (the prompt as the model saw it, and that with the reply, special tokens and all); it is sync
    (then it runs on a thread of its own) or async, and returns a float, None, or {"reward", "score", "metrics"}. `names`
    are what errors call the functions, in place of their own names.
    """

    def __init__(
        self, reward: Reward | Sequence[Reward], weights: Sequence[float] = (), names: Sequence[str] = ()
    ) -> None:
        self.rewards = list(reward) if isinstance(reward, Sequence) else [reward]
        self.weights = list(weights) or [1.0] * len(self.rewards)
        if len(self.weights) != len(self.rewards):
            raise ConfigError(f"--reward.weights: {len(self.weights)} weights for {len(self.rewards)} rewards.")
        self.names = list(names) or [_name(function) for function in self.rewards]
        for function, name in zip(self.rewards, self.names, strict=True):
            check_reward(function, name)

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.trajectory or ctx.begin(task)
        messages = opening(task)
        prompt = ctx.renderer.start(messages, task.tools)
        ctx.keep_images(prompt.images)
        record.messages += messages
        record.tools = list(prompt.tools)
        if prompt.escaped:
            record.metrics["renderer/special_strings"] = float(prompt.escaped)
        budget = ctx.budget(len(prompt))
        if budget <= 0:
            raise EnvError(
                f"task {task.id}: the prompt has {len(prompt)} tokens, rollout.max_len is {ctx.limits.max_len}"
            )
        generation = await ctx.generate(prompt.token_ids, images=prompt.images, max_new_tokens=budget)
        node = record.add_sampled(record.add(None, "prompt", prompt.token_ids, prompt.slots), generation)
        completion = ctx.renderer.text(generation.token_ids)
        record.messages.append({"role": "assistant", "content": completion})
        record.finish_reason = generation.finish_reason
        record.truncated = generation.finish_reason == "length"
        if generation.finish_reason == "placeholder":
            record.metrics["renderer/placeholder"] = 1.0
        verdict = await self.judge(task, completion, ctx, record)
        node.reward, record.score = verdict.reward, verdict.score
        record.metrics.update(verdict.metrics)
        return record

    async def judge(self, task: Task, completion: str, ctx: RolloutContext, record: Trajectory) -> Verdict:
        """The verdict of the reward functions on a completion. Raises EnvError with what one of them raised."""
        offered = {
            "prompt": task.prompt,
            "completion": completion,
            "label": task.label,
            "row": task.row,
            "images": task.images,
            "task": task,
            **_as_seen(record, ctx),
        }
        calls = [
            _Ask(function, f"reward {name}", accepted_options(function, offered), ctx.env_loops)
            for function, name in zip(self.rewards, self.names, strict=True)
        ]
        timeout = ctx.limits.call_timeout_s
        answers = await asyncio.gather(*(call.verdict(timeout) for call in calls), return_exceptions=True)
        abandoned = sum(call.abandoned for call in calls)
        if abandoned:
            record.metrics["errors/abandoned_threads"] = float(abandoned)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return combine([answer for answer in answers if isinstance(answer, Verdict)], self.weights)


@dataclass
class _Ask:
    """One call of one reward function; `abandoned` = it never came back from its thread."""

    function: Reward
    what: str
    given: dict[str, Any]
    loops: EnvLoops | None = None
    abandoned: bool = False

    async def verdict(self, timeout_s: float) -> Verdict:
        """What the function says. Whatever it raises comes out as EnvError."""
        outcome = await self._outcome(timeout_s)
        try:
            return read_verdict(outcome)
        except EnvError as error:
            raise EnvError(f"{self.what}: {error}") from error

    async def _outcome(self, timeout_s: float) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self._awaited(lambda: self.function(**self.given), timeout_s)
        outcome = await self._on_a_thread(timeout_s)
        if inspect.isawaitable(outcome):
            return await self._awaited(lambda: outcome, timeout_s)
        return outcome

    async def _awaited(self, start: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        """Off the loop that serves the engines where there is another."""
        coming = run_async(start, timeout_s) if self.loops is None else self.loops.current().run(start, timeout_s)
        return await blame_env(self.what, coming, timeout_s)

    async def _on_a_thread(self, timeout_s: float) -> Any:
        thread = EnvThread(self.what)
        try:
            return await blame_env(self.what, thread.run(lambda: self.function(**self.given), timeout_s), timeout_s)
        finally:
            self.abandoned = thread.abandoned
            thread.end()


def _as_seen(record: Trajectory, ctx: RolloutContext) -> dict[str, str]:
    """`prompt_text` and `query` of the last sample."""
    if not record.sampled:
        return {"prompt_text": "", "query": ""}
    *before, last = record.sampled[-1].path()
    prompt = [token for node in before for token in node.token_ids]
    text = ctx.renderer.text(prompt, special=True)
    return {"prompt_text": text, "query": ctx.renderer.text([*prompt, *last.token_ids], special=True)}


def _name(function: Reward) -> str:
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
