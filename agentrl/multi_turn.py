"""The stock executor: an Env, turn by turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .engine import Generation
from .env import Task
from .env_session import EnvSession
from .errors import EnvError
from .executor import AgentExecutorBase, RolloutContext
from .messages import Action, Message, ToolCall, normalize
from .renderer import Prompt
from .trajectory import Node, Trajectory

ALLOWED_SAMPLING = ("max_new_tokens", "stop")


class MultiTurnExecutor(AgentExecutorBase):
    """Plays `env_class_or_factory()` until it ends, a limit is reached, or the model's reply cannot be continued."""

    def __init__(self, env_class_or_factory: Callable[[], Any], name: str | None = None) -> None:
        self.factory = env_class_or_factory
        self.name = name or (env_class_or_factory.__name__ if isinstance(env_class_or_factory, type) else "env")

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        session = EnvSession(self.factory, ctx.limits.call_timeout_s, self.name)
        try:
            async with session:
                return await _Episode(session, task, ctx).play()
        finally:
            assert ctx.trajectory is not None
            if session.close_error is not None:
                ctx.trajectory.metrics["errors/close"] = 1.0
            if session.abandoned:
                ctx.trajectory.metrics["errors/abandoned_threads"] = 1.0


@dataclass
class _Step:
    """What one step of the env said."""

    observation: Any
    verdict: float | None
    terminated: bool
    truncated: bool


class _Episode:
    """One run through an env. The record grows with every call, so a failure keeps what came before it."""

    def __init__(self, env: EnvSession, task: Task, ctx: RolloutContext) -> None:
        self.env = env
        self.task = task
        self.ctx = ctx
        self.limits = ctx.limits
        self.renderer = ctx.renderer
        assert ctx.trajectory is not None
        self.record: Trajectory = ctx.trajectory
        self.next_sampling: dict[str, Any] = {}
        self.sampled = 0

    async def play(self) -> Trajectory:
        own_limit = self.env.attribute("max_turns", None)
        turns = min(self.limits.max_turns, own_limit or self.limits.max_turns)
        prompt = await self._reset(turns)
        node = self.record.add(None, "prompt", prompt.token_ids, prompt.slots)
        said = _Step(None, None, False, False)
        for turn in range(turns):
            budget = self._budget(prompt)
            if budget <= 0:
                return self._end("length", said.verdict, truncated=True)
            generation = await self._generate(prompt, budget)
            node = self.record.add_sampled(node, generation)
            self.sampled += len(generation.token_ids)
            reply, action = await self._read(generation, prompt)
            if generation.finish_reason == "placeholder":
                self._count("placeholder")
                return self._end("placeholder", None)
            said = await self._step(action)
            node.reward = said.verdict
            if said.terminated or said.truncated:
                return self._end(generation.finish_reason, said.verdict, truncated=said.truncated)
            if turn + 1 == turns:
                break
            following = self._follow(prompt, generation, reply, said)
            if following is None:
                return self._end("length", said.verdict, truncated=True)
            node = self._grow(node, following)
            prompt = following
        return self._end("max_turns", said.verdict, truncated=True)

    async def _reset(self, turns: int) -> Prompt:
        options: dict[str, Any] = {"max_turns": turns}
        if not self.ctx.draw_task:
            options["task"] = self.task
        seed = self.ctx.seed if self.ctx.env_seed is None else self.ctx.env_seed
        observation, info = await self.env.reset(seed, options)
        if self.ctx.draw_task:
            self.record.task = self.env.attribute("task", self.task)
        self._take_info(info)
        messages = self._messages(observation)
        prompt = self.renderer.start(messages, self.env.attribute("tools", ()) or ())
        self._keep(messages, prompt)
        if len(prompt) >= self.limits.max_len:
            raise EnvError(f"the first prompt has {len(prompt)} tokens, rollout.max_len is {self.limits.max_len}")
        return prompt

    def _budget(self, prompt: Prompt) -> int:
        """Tokens this turn may sample."""
        asked = min(self.limits.max_new_tokens, self.next_sampling.get("max_new_tokens", self.limits.max_new_tokens))
        return min(asked, self.limits.max_len - len(prompt), self.limits.total_tokens - self.sampled)

    async def _generate(self, prompt: Prompt, budget: int) -> Generation:
        stop = self.next_sampling.get("stop")
        return await self.ctx.generate(prompt.token_ids, images=prompt.images, max_new_tokens=budget, stop=stop)

    async def _read(self, generation: Generation, prompt: Prompt) -> tuple[Message, Action]:
        """The assistant's message, and the action the env is given."""
        content, calls = self.renderer.text(generation.token_ids), []
        if prompt.tools:
            raw = self.renderer.text(generation.token_ids, special=True)
            content, calls = await self.ctx.engine.parse(raw, list(prompt.tools))
            content = self.renderer.strip_special(content)
        reply: Message = {"role": "assistant", "content": content}
        if calls:
            reply["tool_calls"] = [_as_openai(call) for call in calls]
        self.record.messages.append(reply)
        action = Action(
            content, tool_calls=calls, token_ids=generation.token_ids, finish_reason=generation.finish_reason
        )
        return reply, action

    async def _step(self, action: Action) -> _Step:
        observation, reward, terminated, truncated, info = await self.env.step(action)
        self._take_info(info)
        verdict = _verdict(reward)
        if verdict is None and reward is not None:
            self._count("no_verdict")
        return _Step(observation, verdict, bool(terminated), bool(truncated))

    def _follow(self, prompt: Prompt, generation: Generation, reply: Message, said: _Step) -> Prompt | None:
        """The next prompt, or None when the observation does not fit."""
        messages = self._messages(said.observation)
        following = self.renderer.extend(prompt, generation, [reply, *messages])
        if len(following) >= self.limits.max_len:
            return None
        self._keep(messages, following)
        return following

    def _grow(self, node: Node, prompt: Prompt) -> Node:
        """Add the observation's tokens after the sample, or a new root where the template rewrote history."""
        if prompt.branched:
            self._count("branches")
            return self.record.add(None, "prompt", prompt.token_ids, prompt.slots)
        slots = [(sha, start - prompt.kept, n) for sha, start, n in prompt.slots if start >= prompt.kept]
        return self.record.add(node, "observation", prompt.token_ids[prompt.kept :], slots)

    def _messages(self, observation: Any) -> list[Message]:
        try:
            return normalize(observation)
        except Exception as error:
            raise EnvError(f"{self.env.name}: the observation cannot be shown to the model: {error}") from error

    def _keep(self, messages: list[Message], prompt: Prompt) -> None:
        self.record.messages += messages
        self.ctx.keep_images(prompt.images)
        if prompt.escaped:
            self._count("special_strings", prompt.escaped)

    def _take_info(self, info: dict[str, Any]) -> None:
        if info.get("score") is not None:
            self.record.score = _number("info['score']", info["score"])
        for key, value in (info.get("metrics") or {}).items():
            self.record.metrics[str(key)] = _number(f"info['metrics'][{key!r}]", value)
        self.next_sampling = dict(info.get("sampling") or {})
        refused = [key for key in self.next_sampling if key not in ALLOWED_SAMPLING]
        if refused and self.ctx.training:
            raise EnvError(
                f"{self.env.name}: info['sampling'] may set {' and '.join(ALLOWED_SAMPLING)}; {', '.join(refused)} "
                "would change the distribution that is trained"
            )

    def _count(self, what: str, n: int = 1) -> None:
        key = f"renderer/{what}" if what in ("branches", "special_strings", "placeholder") else what
        self.record.metrics[key] = self.record.metrics.get(key, 0.0) + n

    def _end(self, reason: str, last_verdict: float | None, *, truncated: bool = False) -> Trajectory:
        self.record.finish_reason = reason
        self.record.truncated = truncated or reason == "length"
        if last_verdict is None:
            self.record.withhold_verdict()
        return self.record


def _number(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise EnvError(f"{what} must be a number, not {repr(value)[:80]}") from error


def _verdict(reward: Any) -> float | None:
    """A finite number, else None. Raises EnvError for what is no number at all."""
    if reward is None:
        return None
    value = _number("a reward", reward)
    return value if math.isfinite(value) else None


def _as_openai(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if call.arguments is not None else call.raw
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
