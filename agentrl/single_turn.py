"""The stock executor for prompts with a reward function: one prompt, one completion, one verdict."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .env import Task
from .env_session import EnvThread
from .errors import AgentRLError, EnvError
from .executor import AgentExecutorBase, RolloutContext
from .messages import Image, Message, normalize
from .registry import accepted_options
from .reward import Verdict, check_reward, combine, read_verdict
from .trajectory import Trajectory

Reward = Callable[..., Any]


class SingleTurnExecutor(AgentExecutorBase):
    """Samples one completion of `task.prompt` and asks one or several reward functions about it.

    A reward function is called with the keywords it names among prompt, completion, label, row, images, task; it is sync
    (then it runs on a thread of its own) or async, and returns a float, None, or {"reward", "score", "metrics"}.
    """

    def __init__(self, reward: Reward | Sequence[Reward], weights: Sequence[float] = ()) -> None:
        self.rewards = list(reward) if isinstance(reward, Sequence) else [reward]
        self.weights = list(weights) or [1.0] * len(self.rewards)
        for function in self.rewards:
            check_reward(function, _name(function))

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.trajectory or ctx.begin(task)
        messages = _opening(task)
        prompt = ctx.renderer.start(messages)
        ctx.keep_images(prompt.images)
        record.messages += messages
        budget = min(ctx.limits.max_new_tokens, ctx.limits.max_len - len(prompt), ctx.limits.total_tokens)
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
        verdict = await self._judge(task, completion, ctx)
        node.reward, record.score = verdict.reward, verdict.score
        record.metrics.update(verdict.metrics)
        return record

    async def _judge(self, task: Task, completion: str, ctx: RolloutContext) -> Verdict:
        offered = {
            "prompt": task.prompt,
            "completion": completion,
            "label": task.label,
            "row": task.row,
            "images": task.images,
            "task": task,
        }
        timeout = ctx.limits.call_timeout_s
        verdicts = await asyncio.gather(*(_ask(function, offered, timeout) for function in self.rewards))
        return combine(verdicts, self.weights)


async def _ask(function: Reward, offered: dict[str, Any], timeout_s: float) -> Verdict:
    """The fault boundary of one reward function: what it raises comes out as EnvError."""
    given = accepted_options(function, offered)
    try:
        if inspect.iscoroutinefunction(function):
            return read_verdict(await asyncio.wait_for(function(**given), timeout_s))
        thread = EnvThread(f"reward {_name(function)}")
        try:
            return read_verdict(await thread.run(lambda: function(**given), timeout_s))
        finally:
            thread.end()
    except TimeoutError as error:
        raise EnvError(f"reward {_name(function)} took longer than {timeout_s:g} s") from error
    except AgentRLError:
        raise
    except Exception as error:
        raise EnvError(f"reward {_name(function)} raised {type(error).__name__}: {error}") from error


def _opening(task: Task) -> list[Message]:
    """The messages of a task: its prompt, with its images in front where the prompt is a plain string."""
    if isinstance(task.prompt, str):
        parts: list[Any] = [Image(image) for image in task.images]
        return normalize([*parts, task.prompt] if parts else task.prompt)
    return normalize(task.prompt if task.prompt is not None else "")


def _name(function: Reward) -> str:
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
