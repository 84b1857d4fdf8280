"""What agent files import from `openrlhf.utils.agent`, with that module's names and calls.

The loops are those that files of this format expect: text is tokenised as it is, never through a chat template, what was
sampled is never tokenised again, and feedback is tokenised alone. `llm_engine` is an `EpisodeEngine`.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..errors import EnvError, InfrastructureError
from .values import number

HTTP_TRIES, HTTP_TIMEOUT_S, HTTP_WAIT_S = 5, 180.0, 1.0
__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"]


class AgentExecutorBase(ABC):
    """Drives one episode; `execute` returns a result dict."""

    @abstractmethod
    async def execute(
        self, prompt: Any, label: Any, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
    ) -> Any:
        raise NotImplementedError


class AgentInstanceBase(ABC):
    """An environment of one episode; a fresh one each time."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class _Given:
    """What an executor is given for one episode."""

    prompt: Any
    label: Any
    sampling_params: Any
    max_length: int
    hf_tokenizer: Any
    llm_engine: Any
    images: Sequence[Any]

    def first_ids(self, text: str, images: Sequence[Any]) -> list[int]:
        """The ids of a prompt, cut so that one sample has room after it. A sample that only `max_length` bounds has one
        token at least.
        """
        longest = self.sampling_params.max_tokens or self.max_length
        room = self.max_length - (longest if longest < self.max_length else 1)
        ids: list[int] = self.llm_engine.encode(text, images, most=room)
        return ids


class _StockExecutor(AgentExecutorBase):
    """An executor that takes what it is given as one value."""

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Sequence[Any] = (),
    ) -> dict[str, Any]:
        return await self._play(_Given(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images))

    @abstractmethod
    async def _play(self, given: _Given) -> dict[str, Any]: ...


class MultiTurnAgentExecutor(_StockExecutor):
    """`reset` once, then a sample and a `step` until one says `done` or the limits end it. Rewards add up; `scores` and
    `extra_logs` are those of the last step.
    """

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def _play(self, given: _Given) -> dict[str, Any]:
        instance = await _fresh(self.agent_instance_cls)
        said = await instance.reset({"observation": given.prompt, "label": given.label})
        text = said["observation"]
        shown = [*given.images, *(said.get("environment_images") or said.get("images") or [])]
        turn = _Turns(given.first_ids(text, shown))
        llm_engine, max_length, sampling_params = given.llm_engine, given.max_length, given.sampling_params
        while llm_engine.budget(len(turn.tokens)) > 0:
            params = deepcopy(sampling_params)
            params.max_tokens = min(params.max_tokens or max_length, max_length - len(turn.tokens))
            output = await llm_engine.generate(turn.tokens, params, images=shown)
            sampled = output.outputs[0]
            turn.sampled(list(sampled.token_ids), sampled.finish_reason)
            states = {
                "observation_text": text,
                "action_text": sampled.text,
                "label": given.label,
                "sampling_params": sampling_params,
            }
            step = await instance.step(states)
            turn.judged(step)
            feedback = step["environment_feedback"]
            text += sampled.text + feedback
            more = list(step.get("environment_images") or [])
            ids = llm_engine.encode(feedback, more) if not step["done"] else []
            if step["done"] or len(turn.tokens) + len(ids) >= max_length:
                turn.truncated = not step["done"]
                break
            turn.tokens, shown = turn.tokens + ids, shown + more
            sampling_params = step.get("sampling_params") or sampling_params
        else:
            turn.truncated = True
        return turn.result(given)


class _Turns:
    """The tokens of an episode so far, where the samples stand in them, and what the steps said."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.ranges: list[tuple[int, int]] = []
        self.rewards: list[float | None] = []
        self.scores: Any = None
        self.logs: Any = {}
        self.truncated = False

    def sampled(self, ids: list[int], finish_reason: str) -> None:
        self.ranges.append((len(self.tokens), len(self.tokens) + len(ids)))
        self.tokens = self.tokens + ids
        self.truncated = finish_reason == "length"

    def judged(self, step: dict[str, Any]) -> None:
        missing = {"rewards", "environment_feedback", "done"} - step.keys()
        if missing:
            raise EnvError(f"step must return {', '.join(sorted(missing))} as well")
        self.rewards.append(number(step["rewards"], "rewards"))
        self.scores = step.get("scores", self.total)
        self.logs = step.get("extra_logs") or {}

    @property
    def total(self) -> float | None:
        """The sum of what the steps gave; None, no verdict, where the last one gave none."""
        if not self.rewards or self.rewards[-1] is None:
            return None
        return sum(reward for reward in self.rewards if reward is not None)

    def result(self, given: _Given) -> dict[str, Any]:
        return {
            "prompt": given.prompt,
            "label": given.label,
            "observation_tokens": self.tokens,
            "action_ranges": self.ranges,
            "reward": self.total,
            "rewards": self.rewards,
            "scores": self.scores,
            "extra_logs": self.logs,
            "truncated": self.truncated,
        }


class SingleTurnAgentExecutor(_StockExecutor):
    """One sample, judged by the `reward_func` of a .py file or by servers that answer `{"query", "prompts", "labels"}`."""

    def __init__(self, remote_rm_url: str | Sequence[str] | None = None) -> None:
        given = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        self.reward_endpoints = given
        self.reward_func: Any = None
        if given and given[0].endswith(".py"):
            from .load import load_file

            self.reward_func = load_file(given[0]).reward_func

    async def _play(self, given: _Given) -> dict[str, Any]:
        turn = _Turns(given.first_ids(given.prompt, given.images))
        params = deepcopy(given.sampling_params)
        output = await given.llm_engine.generate(turn.tokens, params, images=given.images)
        turn.sampled(list(output.outputs[0].token_ids), output.outputs[0].finish_reason)
        result = turn.result(given)
        if self.reward_endpoints:
            query = given.hf_tokenizer.decode(turn.tokens, skip_special_tokens=False)
            found = await self._ask([query], [given.prompt], [given.label])
            rewards, scores = found.get("rewards"), found.get("scores")
            result |= {"reward": rewards, "scores": rewards if scores is None else scores}
            result["extra_logs"] = found.get("extra_logs") or {}
        return result

    async def _ask(self, queries: list[str], prompts: list[Any], labels: list[Any]) -> Any:
        if self.reward_func is not None:
            return await asyncio.to_thread(self.reward_func, queries, prompts, labels)
        body = {"query": queries, "prompts": prompts, "labels": labels}
        said = ""
        for attempt in range(HTTP_TRIES):
            url = self.reward_endpoints[attempt % len(self.reward_endpoints)]
            if attempt:
                await asyncio.sleep(HTTP_WAIT_S)
            try:
                timeout = aiohttp.ClientTimeout(HTTP_TIMEOUT_S)
                async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url, json=body) as reply:
                    reply.raise_for_status()
                    return await reply.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                said = f"{url}: {type(error).__name__}: {error}"
        raise InfrastructureError(f"no reward server answers: {said}")


async def _fresh(cls: Any) -> Any:
    """An instance of a class, whose `__init__` may be `async def`."""
    if not inspect.iscoroutinefunction(cls.__init__):
        return cls()
    instance = cls.__new__(cls)
    await cls.__init__(instance)
    return instance
