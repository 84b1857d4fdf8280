"""The stock executor: an Env, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .engine import Generation
from .env import Task
from .env_session import EnvSession
from .errors import DataError, EnvError
from .executor import AgentExecutorBase, RolloutContext
from .messages import Action, Message, ToolCall, message_images, normalize
from .renderer import Prompt
from .seeds import call_id
from .step_info import Info, finite, read_info, whole_number
from .trajectory import Node, Trajectory


class MultiTurnExecutor(AgentExecutorBase):
    """Plays `env_class_or_factory()` until it ends, a limit is reached, or the model's reply cannot be continued."""

    def __init__(self, env_class_or_factory: Callable[[], Any], name: str | None = None) -> None:
        self.factory = env_class_or_factory
        self.name = name or (env_class_or_factory.__name__ if isinstance(env_class_or_factory, type) else "env")

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.trajectory or ctx.begin(task)
        session = EnvSession(self.factory, ctx.limits.call_timeout_s, self.name, ctx.env_loops)
        try:
            async with session:
                return await _Episode(session, task, ctx, record).play()
        finally:
            if session.close_error is not None:
                record.metrics["errors/close"] = 1.0
            if session.abandoned:
                record.metrics["errors/abandoned_threads"] = 1.0


@dataclass
class _Step:
    """What one step of the env said."""

    observation: Any
    verdict: float | None
    terminated: bool
    truncated: bool


class _Episode:
    """One run through an env. The record grows with every call, so a failure keeps what came before it."""

    def __init__(self, env: EnvSession, task: Task, ctx: RolloutContext, record: Trajectory) -> None:
        self.env = env
        self.task = task
        self.ctx = ctx
        self.limits = ctx.limits
        self.renderer = ctx.renderer
        self.record = record
        self.info = Info()
        self.call_ids: set[str] = set()

    async def play(self) -> Trajectory:
        turns = await self._turns()
        prompt = await self._reset(turns)
        node = self.record.add(None, "prompt", prompt.token_ids, prompt.slots)
        said = _Step(None, None, False, False)
        for turn in range(turns):
            budget = self.ctx.budget(len(prompt), self.info.max_new_tokens)
            if budget <= 0:
                return self._end("length", said, truncated=True)
            generation = await self._generate(prompt, budget)
            node = self.record.add_sampled(node, generation)
            reply, action = await self._read(generation, prompt)
            said = await self._step(action)
            node.reward = said.verdict
            if generation.finish_reason == "placeholder":
                self._count("renderer/placeholder")
                return self._end("placeholder", said)
            if said.terminated or said.truncated:
                return self._end(generation.finish_reason, said, truncated=said.truncated)
            if turn + 1 == turns:
                break
            if self.ctx.budget(0) <= 0:
                return self._end("length", said, truncated=True)
            following = await self._follow(prompt, generation, reply, said)
            if following is None:
                return self._end("length", said, truncated=True)
            node = self._grow(node, following)
            prompt = following
        return self._end("max_turns", said, truncated=True)

    async def _turns(self) -> int:
        own = await self.env.attribute("max_turns", None)
        return self.limits.max_turns if own is None else min(self.limits.max_turns, whole_number("max_turns", own))

    async def _reset(self, turns: int) -> Prompt:
        options: dict[str, Any] = {"max_turns": turns}
        if not self.ctx.draw_task:
            options["task"] = self.task
        seed = self.ctx.seed if self.ctx.env_seed is None else self.ctx.env_seed
        observation, info = await self.env.reset(seed, options)
        if self.ctx.draw_task:
            drawn = await self.env.attribute("task", None)
            self.record.task = drawn if isinstance(drawn, Task) else self.task
        self._take(info)
        messages = await self._messages(observation)
        if self.renderer.exceeds(messages, self.limits.max_len):
            raise EnvError(f"the first observation is far longer than rollout.max_len = {self.limits.max_len} tokens")
        prompt = self.renderer.start(messages, await self._tools())
        self._keep(messages, prompt)
        self.record.tools = list(prompt.tools)
        if len(prompt) >= self.limits.max_len:
            raise EnvError(f"the first prompt has {len(prompt)} tokens, rollout.max_len is {self.limits.max_len}")
        return prompt

    async def _tools(self) -> list[dict[str, Any]]:
        tools = await self.env.attribute("tools", None) or []
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvError(f"{self.env.name}.tools must be a list of OpenAI function schemas")
        return list(tools)

    async def _generate(self, prompt: Prompt, budget: int) -> Generation:
        sampling = replace(self.ctx.sampling, **self.info.changes) if self.info.changes else None
        return await self.ctx.generate(
            prompt.token_ids, images=prompt.images, max_new_tokens=budget, stop=self.info.stop, sampling=sampling
        )

    async def _read(self, generation: Generation, prompt: Prompt) -> tuple[Message, Action]:
        """The assistant's message, and the action the env is given."""
        content, calls = self.renderer.text(generation.token_ids), []
        if prompt.tools:
            raw = self.renderer.text(generation.token_ids, special=True)
            content, parsed = await self.ctx.parse(raw, list(prompt.tools))
            content = self.renderer.strip_special(content or "")
            calls = [self._with_own_id(call, raw) for call in parsed]
        reply: Message = {"role": "assistant", "content": content}
        if calls:
            reply["tool_calls"] = [_as_openai(call) for call in calls]
        self.record.messages.append(reply)
        action = Action(
            content, tool_calls=calls, token_ids=generation.token_ids, finish_reason=generation.finish_reason
        )
        return reply, action

    def _with_own_id(self, call: ToolCall, raw: str) -> ToolCall:
        """An id that the model wrote stays. Any other comes from the seed: templates print ids, and runs repeat."""
        if call.id not in raw or call.id in self.call_ids:
            call = replace(call, id=call_id(self.ctx.seed, len(self.call_ids)))
        self.call_ids.add(call.id)
        return call

    async def _step(self, action: Action) -> _Step:
        observation, reward, terminated, truncated, info = await self.env.step(action)
        self._take(info)
        verdict = None if reward is None else finite("the reward", reward)
        if verdict is None and reward is not None:
            self._count("rewards_not_finite")
        return _Step(observation, verdict, _flag("terminated", terminated), _flag("truncated", truncated))

    async def _follow(self, prompt: Prompt, generation: Generation, reply: Message, said: _Step) -> Prompt | None:
        """The next prompt, or None when the observation does not fit."""
        messages = await self._messages(said.observation)
        if self.renderer.exceeds(messages, self.limits.max_len):
            return None
        following = self.renderer.extend(prompt, generation, [reply, *messages])
        if len(following) >= self.limits.max_len:
            return None
        self._keep(messages, following)
        return following

    def _grow(self, node: Node, prompt: Prompt) -> Node:
        """Add the observation's tokens after the sample, or a new root where the template rewrote history."""
        if prompt.branched:
            self._count("renderer/branches")
            return self.record.add(None, "prompt", prompt.token_ids, prompt.slots)
        slots = [(sha, start - prompt.kept, n) for sha, start, n in prompt.slots if start >= prompt.kept]
        return self.record.add(node, "observation", prompt.token_ids[prompt.kept :], slots)

    async def _messages(self, observation: Any) -> list[Message]:
        """The observation as messages, its pictures decoded and hashed on the env's thread."""
        return await self.env.run("its observation", lambda: _readable(observation))

    def _keep(self, messages: list[Message], prompt: Prompt) -> None:
        self.record.messages += messages
        self.ctx.keep_images(prompt.images)
        if prompt.escaped:
            self._count("renderer/special_strings", prompt.escaped)

    def _take(self, info: dict[str, Any]) -> None:
        self.info = read_info(info, self.env.name, training=self.ctx.training)
        if self.info.score is not None:
            self.record.score = self.info.score
        self.record.metrics.update(self.info.metrics)

    def _count(self, key: str, n: int = 1) -> None:
        self.record.metrics[key] = self.record.metrics.get(key, 0.0) + n

    def _end(self, reason: str, last: _Step, *, truncated: bool = False) -> Trajectory:
        self.record.finish_reason = reason
        self.record.truncated = truncated or reason == "length"
        if last.verdict is None:
            self.record.withhold_verdict()
        return self.record


def _readable(observation: Any) -> list[Message]:
    try:
        messages = normalize(observation)
        for image in message_images(messages):
            _ = image.sha256
    except DataError as error:
        raise EnvError(f"the observation cannot be shown to the model: {error}") from error
    return messages


def _flag(what: str, value: Any) -> bool:
    try:
        return bool(value)
    except Exception as error:  # an array has no truth value
        raise EnvError(f"{what} must be True or False, not {repr(value)[:80]}") from error


def _as_openai(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if call.arguments is not None else call.raw
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
