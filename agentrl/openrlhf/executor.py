"""An executor of OpenRLHF's format as one of ours."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine import Generation, Span
from ..env import Task
from ..env_calls import blame_env, run_async
from ..errors import AgentError
from ..executor import AgentExecutorBase, RolloutContext
from ..messages import Message
from ..single_turn import opening
from ..trajectory import Node, Trajectory
from .engine import Call, EpisodeEngine, SamplingParams
from .episodes import Episodes
from .values import logs, number


class OpenRLHFExecutor(AgentExecutorBase):
    """Runs `execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)` of such a file.

    Its code runs on the loop of async environments. What it says it sampled (`action_ranges`) is trained in the context in
    which the engine sampled it, with the engine's log-probabilities and versions.
    """

    def __init__(self, theirs: Any, name: str) -> None:
        self.theirs = theirs
        self.name = name
        self._takes = set(inspect.signature(theirs.execute).parameters)
        self._episodes = Episodes()

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        engine = EpisodeEngine(ctx, asyncio.get_running_loop(), self._episodes)
        with self._episodes.playing(engine):
            return await self._play(task, ctx, engine)

    async def _play(self, task: Task, ctx: RolloutContext, engine: EpisodeEngine) -> Trajectory:
        record = ctx.trajectory or ctx.begin(task)
        given = {
            "prompt": prompt_text(task, ctx),
            "label": task.label,
            "sampling_params": SamplingParams(
                max_tokens=ctx.limits.max_new_tokens, temperature=ctx.sampling.temperature, seed=ctx.seed
            ),
            "max_length": ctx.limits.max_len,
            "hf_tokenizer": ctx.renderer.tokenizer,
            "llm_engine": engine,
            "images": [image.pil for image in task.images],
        }
        result = await self._run({name: value for name, value in given.items() if name in self._takes}, ctx, engine)
        results = result if isinstance(result, list) else [result]
        if not all(
            isinstance(one, Mapping) and {"observation_tokens", "action_ranges"} <= one.keys() for one in results
        ):
            raise AgentError(
                f"{self.name}: execute must return a dict with observation_tokens, action_ranges and reward"
            )
        for one in results:
            fill(record, one, engine, ctx)
        if engine.cut_prompts:
            record.metrics["openrlhf/cut_prompts"] = float(engine.cut_prompts)
        return record

    async def _run(self, given: dict[str, Any], ctx: RolloutContext, engine: EpisodeEngine) -> Any:
        bound = ctx.limits.episode_timeout_s

        async def start() -> Any:
            with self._episodes.running(engine):
                return await self.theirs.execute(**given)

        loop = ctx.env_loops.current() if ctx.env_loops is not None else None
        call = run_async(start, bound) if loop is None else loop.run(start, bound)
        return await blame_env(f"{self.name}: execute", call, bound)


def prompt_text(task: Task, ctx: RolloutContext) -> str:
    """The prompt as such files get it: rendered by the chat template, or as it is where there is none."""
    template = ctx.renderer.template
    if template.literal and isinstance(task.prompt, str):
        return task.prompt
    return template.render(opening(task), task.tools)


def fill(record: Trajectory, result: Mapping[str, Any], engine: EpisodeEngine, ctx: RolloutContext) -> None:
    """One result dict into the record. Raises AgentError for samples that the engine did not make."""
    tokens = [int(i) for i in result["observation_tokens"]]
    rest, node, last = list(engine.calls), None, None
    ranges = [(int(start), int(end)) for start, end in result["action_ranges"]]
    rewards = _turn_rewards(result, len(ranges))
    for (start, end), reward in zip(ranges, rewards, strict=True):
        last = _taken(rest, tuple(tokens[:start]), tuple(tokens[start:end]), engine)
        node = _add(record, node, last, end - start, ctx)
        node.reward = reward
    if rewards and rewards[-1] is None and node is not None:
        node.reward = math.nan
    if node is None or last is None:
        raise AgentError("the executor sampled nothing: action_ranges is empty")
    score = number(result.get("scores"), "scores")
    if score is not None:
        record.score = score
    record.metrics.update(logs(result.get("extra_logs")))
    record.finish_reason = last.generation.finish_reason
    record.truncated = bool(result.get("truncated", record.finish_reason == "length"))


def _turn_rewards(result: Mapping[str, Any], turns: int) -> list[float | None]:
    """The reward of each turn where the result has them, else the whole on the last."""
    each = result.get("rewards")
    if isinstance(each, list) and len(each) == turns:
        return [number(reward, "rewards") for reward in each]
    return [*[None] * (turns - 1), number(result.get("reward"), "reward")] if turns else []


def _taken(calls: list[Call], context: tuple[int, ...], ids: tuple[int, ...], engine: EpisodeEngine) -> Call:
    """The call, not used before, that sampled these ids (or more), at best in this context, be it through the engine of
    another episode.
    """
    fitting = [call for call in calls if ids and call.generation.token_ids[: len(ids)] == ids]
    call = next((call for call in fitting if call.prompt == context), None)
    if call is None and ids:
        call = engine.episodes.claim(context, ids, engine)
    if call is None and not fitting:
        raise AgentError(
            "an action range holds other tokens than the engine sampled: what was sampled must stay as it is"
        )
    call = call or fitting[0]
    engine.trained.append(call)
    calls[:] = [one for one in calls if one is not call]
    return call


def _add(record: Trajectory, parent: Node | None, call: Call, length: int, ctx: RolloutContext) -> Node:
    """The context and the sample below `parent` where that is its beginning, else below a new root."""
    before = [token for node in parent.path() for token in node.token_ids] if parent is not None else []
    kept = len(before) if list(call.prompt[: len(before)]) == before else 0
    slots = ctx.renderer.slots(call.prompt, call.images)
    fresh = [(sha, start - kept, count) for sha, start, count in slots if start >= kept]
    node = parent if kept else None
    if len(call.prompt) > kept or node is None:
        node = record.add(node, "observation" if kept else "prompt", call.prompt[kept:], fresh)
    record.messages += _messages(call, kept, length, ctx)
    return record.add_sampled(node, _first(call.generation, length))


def _messages(call: Call, kept: int, length: int, ctx: RolloutContext) -> Sequence[Message]:
    said = ctx.renderer.text(call.prompt[kept:], special=True)
    sampled = ctx.renderer.text(call.generation.token_ids[:length])
    return [{"role": "user", "content": said}, {"role": "assistant", "content": sampled}]


def _first(generation: Generation, length: int) -> Generation:
    """The sample up to `length` tokens."""
    if length == len(generation.token_ids):
        return generation
    spans = tuple(Span(s.version, s.start, min(s.end, length)) for s in generation.version_spans if s.start < length)
    return Generation(generation.token_ids[:length], generation.logprobs[:length], spans, generation.finish_reason)
