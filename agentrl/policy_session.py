"""The policy's side of one rollout whose agent runs elsewhere: every request walks the message graph.

A request is a whole conversation. Its longest prefix that ends with a reply of ours is continued token by token, the sampled
ids as they are and everything new as one delta; a conversation without such a prefix starts a root of its own. So any agent that
keeps, edits, compacts or branches its history is trained in exactly the contexts that it saw. No HTTP here, and one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .engine import Generation, Sampling
from .errors import AgentRLError, DataError, EngineError
from .executor import RolloutContext
from .json_bounds import json_fault
from .messages import Message, ToolCall
from .policy_ask import (
    FORMAT,
    TEMPLATE_ONLY,
    Ask,
    BadAskError,
    ContextLengthError,
    SessionEndedError,
    chain,
    changes_distribution,
    following,
    json_schema,
)
from .policy_call import Call, Turn, assistant_message
from .policy_pictures import PolicyPictures
from .renderer import Prompt
from .reward import Verdict
from .seeds import call_id
from .trajectory import Node, Trajectory

log = logging.getLogger(__name__)
SamplingMode = Literal["force", "strict", "free"]
"""force: ours, whatever is asked; strict: anything else is refused; free: as asked (nothing is trained)."""

ENGINE_WISHES = ("temperature", "top_p", "top_k", "min_p")


@dataclass(eq=False)
class _Context:
    """A rendered conversation and its place in the trajectory; `link` is its entry in the chain."""

    prompt: Prompt
    node: Node
    link: bytes


class PolicySession:
    """The conversations of one rollout. Methods may be called concurrently from the tasks of one event loop.

    `failure` is what the engine last failed with, until it answers again (a request that it refused is the agent's fault);
    `exhausted` = the last thing that happened is a refusal for want of budget; `ended` = no request is answered any more,
    `over` = the record is complete. `record` holds every reply; one that was not delivered is in it as aborted. `conversations`
    is for dialects in which a request names an earlier reply instead of repeating what was said: by its name the messages up to
    and with it, and the tools that were shown.
    """

    def __init__(
        self,
        ctx: RolloutContext,
        record: Trajectory,
        *,
        sampling: SamplingMode = "force",
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.ctx = ctx
        self.record = record
        self.sampling = sampling
        self.ended = False
        self.over = False
        self.failure: AgentRLError | None = None
        self.exhausted = False
        self.pictures = PolicyPictures()
        self.conversations: dict[str, tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]] = {}
        ctx.gives_up = True
        self._warn = warn
        self._known: dict[bytes, Turn] = {}
        self._contexts: dict[tuple[Node | None, bytes], _Context] = {}
        self._calls: defaultdict[str, list[Call]] = defaultdict(list)
        self._by_key: dict[str, Call] = {}
        self._had: list[Turn] = []
        self._ending = asyncio.Lock()
        self._posted: set[str] = set()
        self._posting: tuple[Turn, str] | None = None
        self._turns = 0
        self._call_ids = 0

    # ------------------------------------------------------------------ requests

    def ask(self, ask: Ask, fingerprint: str = "", *, retried: bool = False, key: str | None = None) -> Call:
        """The call that answers a request: the recorded one if this is a retry, else a new one, which begins at once.

        `fingerprint` stands for the request's body, `key` is its Idempotency-Key, `retried` = the client says that it asks
        again. Raises SessionEndedError, ContextLengthError, BadAskError.
        """
        self.refuse_ended()
        recorded = self._recorded(fingerprint, retried, key)
        if recorded is not None:
            self.count("policy/replayed")
            return recorded
        self._check_wishes(ask)
        context = self._context(ask)
        held = [self._check_budget(ask, context.prompt)] * ask.n
        self._turns += ask.n
        self.ctx.reserve(sum(held))
        sampling = asyncio.ensure_future(self._sample_all(ask, context, held))
        sampling.add_done_callback(_retrieve)
        sampling.add_done_callback(lambda _: self.ctx.reserve(-sum(held)))
        call = Call(self, fingerprint, len(context.prompt), sampling)
        self._calls[fingerprint].append(call)
        if key is not None:
            self._by_key[key] = call
        return call

    def refuse_ended(self) -> None:
        """Raises SessionEndedError after the end, and counts."""
        if self.ended:
            self.count("policy/after_end")
            raise SessionEndedError("this rollout has ended")

    def _recorded(self, fingerprint: str, retried: bool, key: str | None) -> Call | None:
        if key is not None and key in self._by_key:
            call = self._by_key[key]
            if call.fingerprint != fingerprint:
                raise BadAskError("this Idempotency-Key was used for another request")
            return call if call.replayable else None
        same = self._calls[fingerprint]
        for call in same:
            if call.dropped or (retried and call.replayable and not call.delivered):
                return call
        return same[-1] if retried and same and same[-1].replayable else None

    def _check_wishes(self, ask: Ask) -> None:
        if ask.n < 1:
            raise BadAskError("n must be at least 1")
        heeded = (FORMAT,) if self.sampling == "free" else ()
        unheeded = [name for name in TEMPLATE_ONLY if ask.wishes.get(name) is not None and name not in heeded]
        if unheeded:
            self._warn(f"{' and '.join(unheeded)}: the policy is asked, not forced: it could not be trained otherwise")
        if self.sampling == "free":
            self._heed(ask)
            return
        changed = changes_distribution(ask.wishes, self.ctx.sampling.temperature)
        if not changed:
            return
        if self.sampling == "strict":
            raise BadAskError(f"agent.sampling = strict: {', '.join(changed.values())} would change what is trained")
        self._warn(f"agents set {', '.join(changed)}; the run's own sampling is used (agent.sampling = force)")

    def _heed(self, ask: Ask) -> None:
        """What is asked is done; what the engine cannot do is refused."""
        unknown = changes_distribution({k: v for k, v in ask.wishes.items() if k not in ENGINE_WISHES}, 1.0)
        if unknown:
            raise BadAskError(f"not supported: {', '.join(unknown.values())}")
        _as_asked(self.ctx.sampling, ask.wishes)  # refuses a format here, before anything is sampled
        if isinstance(seed := ask.wishes.get("seed"), int):
            self.ctx.seed = seed

    def _check_budget(self, ask: Ask, prompt: Prompt) -> int:
        """Tokens that each of the replies may have."""
        limits = self.ctx.limits
        if self._turns + ask.n > limits.max_turns:
            self._exhaust(f"the rollout has had its {limits.max_turns} turns")
        budget = self.ctx.budget(len(prompt), ask.max_tokens, ask.n)
        if budget <= 0:
            self._exhaust(
                f"the request has {len(prompt)} tokens, the maximum context length is {limits.max_len} tokens, and a rollout "
                f"may sample {limits.total_tokens}, calls under way included"
            )
        return budget

    def _exhaust(self, why: str) -> None:
        self.exhausted = True
        raise ContextLengthError(f"context_length_exceeded: {why}")

    # ------------------------------------------------------------------ the message graph

    def _context(self, ask: Ask) -> _Context:
        """Where the request stands: after the longest known prefix, or at a root of its own."""
        links = chain(ask.messages, ask.tools)
        turn, covered = self._longest(links)
        if turn is not None:
            turn.echoed = True
        place = (turn.node if turn else None, links[-1])
        if place not in self._contexts:
            self._contexts[place] = self._render(ask, turn, covered, links[-1])
        return self._contexts[place]

    def _longest(self, links: list[bytes]) -> tuple[Turn | None, int]:
        for covered in range(len(links) - 1, 0, -1):
            if links[covered] in self._known:
                return self._known[links[covered]], covered
        return None, 0

    def _render(self, ask: Ask, turn: Turn | None, covered: int, link: bytes) -> _Context:
        new = list(ask.messages[covered:])
        try:
            if turn is None:
                prompt = self.ctx.renderer.start(new, ask.tools)
            else:
                prompt = self.ctx.renderer.extend(turn.prompt, turn.generation, [turn.message, *new])
        except DataError as error:
            raise BadAskError(str(error)) from error
        self.ctx.keep_images(prompt.images)
        if prompt.branched or any(message["role"] == "assistant" for message in new):
            self.count("renderer/branches")
        if prompt.escaped:
            self.count("renderer/special_strings", prompt.escaped)
        self.record.messages += new
        self.record.tools = list(prompt.tools)
        return _Context(prompt, self._place(turn, prompt), link)

    def _place(self, turn: Turn | None, prompt: Prompt) -> Node:
        if turn is None or prompt.branched:
            return self.record.add(None, "prompt", prompt.token_ids, prompt.slots)
        slots = [(sha, start - prompt.kept, n) for sha, start, n in prompt.slots if start >= prompt.kept]
        return self.record.add(turn.node, "observation", prompt.token_ids[prompt.kept :], slots)

    # ------------------------------------------------------------------ sampling

    async def _sample_all(self, ask: Ask, context: _Context, held: list[int]) -> list[Turn]:
        """n siblings. When one fails, the others are cancelled: a request is answered as a whole. Each takes its part of `held`,
        tokens that were reserved for them.
        """
        samples = [asyncio.ensure_future(self._sample(ask, context, held)) for _ in range(ask.n)]
        try:
            return list(await asyncio.gather(*samples))
        finally:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)

    async def _sample(self, ask: Ask, context: _Context, held: list[int]) -> Turn:
        node, budget = None, held.pop()
        self.ctx.reserve(-budget)
        try:
            generation = await self.ctx.generate(
                context.prompt.token_ids,
                images=context.prompt.images,
                max_new_tokens=budget,
                stop=ask.stop or None,
                sampling=_as_asked(self.ctx.sampling, ask.wishes) if self.sampling == "free" else None,
            )
            node = self.record.add_sampled(context.node, _aborted(generation))
            content, calls, stop = await self._read(generation, ask)
        except BaseException as error:
            self._lost(context, node, error)
            raise
        self.failure = None
        if generation.finish_reason == "placeholder":
            self.count("renderer/placeholder")
        link = following(context.link, assistant_message(content, calls))
        return Turn(context.prompt, node, generation, content, calls, stop, link)

    def _lost(self, context: _Context, node: Node | None, error: BaseException) -> None:
        """A sample nobody gets: in the record as aborted, out of the turn budget."""
        self._turns -= 1
        if node is None:
            self.record.add_sampled(context.node, Generation((), (), (), "abort"))
        if isinstance(error, asyncio.CancelledError):
            self.count("policy/cancelled")
        else:
            self.count("policy/failed")
        if isinstance(error, EngineError) and error.retryable:
            self.failure = error

    async def _read(self, generation: Generation, ask: Ask) -> tuple[str, tuple[ToolCall, ...], str | None]:
        """(the text that is sent, the calls that are sent, the stop string that cut it); malformed calls stay text."""
        renderer, stops = self.ctx.renderer, ask.stop or self.ctx.sampling.stop
        if not (ask.tools and ask.parse_calls):
            text, stop = cut(renderer.text(generation.token_ids), stops)
            return text, (), stop
        raw, stop = cut(renderer.text(generation.token_ids, special=True), stops)
        content, parsed = await self.ctx.parse(raw, list(ask.tools))
        good = [call for call in parsed if call.name and _fits(call, ask.objects_only)]
        malformed = [call.raw for call in parsed if call not in good]
        if malformed:
            self.count("policy/malformed_calls", len(malformed))
        text = "\n".join(part for part in (renderer.strip_special(content or ""), *malformed) if part)
        return text, tuple(self._with_own_id(call, raw) for call in good), stop

    def _with_own_id(self, call: ToolCall, raw: str) -> ToolCall:
        """An id that the model wrote stays; any other comes from the seed, as templates may print ids and runs repeat."""
        if call.id in raw:
            return call
        self._call_ids += 1
        return replace(call, id=call_id(self.ctx.seed, self._call_ids))

    def take_delivered(self, turns: list[Turn]) -> None:
        """Replies that the agent has: from now on they are trained, and known when they are echoed."""
        for turn in turns:
            turn.node.generation = turn.generation
            turn.entry = turn.message
            self.record.messages.append(turn.entry)
            self._had.append(turn)
            if turn.generation.finish_reason != "placeholder":
                self._known[turn.link] = turn
        self.exhausted = False

    def take_back(self, turns: list[Turn]) -> None:
        """Replies of which the agent turned out not to have all. A reward that was posted meanwhile is the turn's before."""
        for turn in turns:
            turn.node.generation = _aborted(turn.generation)
            self._had.remove(turn)
            self.record.messages = [message for message in self.record.messages if message is not turn.entry]
            same = [other for other in self._had if other.link == turn.link]
            if same:
                self._known[turn.link] = same[-1]
            else:
                self._known.pop(turn.link, None)
            posted, turn.node.reward = turn.node.reward, None
            if posted is not None and self._last is not None:
                self._last.node.reward = posted + (self._last.node.reward or 0.0)

    # ------------------------------------------------------------------ the verdict and the end

    def post_reward(self, posted: Mapping[str, Any], key: str | None = None, *, retried: bool = False) -> None:
        """An agent's own reward, for the last reply before it; several add up. A reward that is there but no finite number is
        no verdict. What was posted is not posted again by a retry, of the same `key` or of the same words in the same place.
        Raises BadAskError when nothing has been sampled yet, SessionEndedError after the end.
        """
        self.refuse_ended()
        if self._last is None:
            raise BadAskError("a reward belongs to the turn before it, and there is none yet")
        posting = (self._last, fingerprint(posted, ""))
        if (key is not None and key in self._posted) or (retried and posting == self._posting):
            return
        self._posting = posting
        if "reward" in posted:
            reward, before = number(posted["reward"]), self._last.node.reward
            self._last.node.reward = math.nan if reward is None else reward + (before or 0.0)
        self.note(posted)
        if key is not None:
            self._posted.add(key)

    def note(self, said: Mapping[str, Any]) -> None:
        """Take the `score` and `metrics` of what an agent said. Raises BadAskError."""
        metrics = said.get("metrics") or {}
        if not isinstance(metrics, Mapping):
            raise BadAskError("metrics must be an object of names and numbers")
        if (score := number(said.get("score"))) is not None:
            self.record.score = score
        self.record.metrics.update({str(k): v for k, value in metrics.items() if (v := number(value)) is not None})

    def judge(self, verdict: Verdict) -> None:
        """The verdict on the whole rollout, in place of what was posted; it goes to the last reply."""
        for node in self.record.nodes:
            node.reward = None
        if self._last is not None:
            self._last.node.reward = verdict.reward
        if verdict.reward is None:
            self.record.withhold_verdict()
        if verdict.score is not None:
            self.record.score = verdict.score
        self.record.metrics.update(verdict.metrics)

    @property
    def _last(self) -> Turn | None:
        return self._had[-1] if self._had else None

    @property
    def last_text(self) -> str:
        """What the model wrote last; '' when it wrote nothing."""
        return self._last.content if self._last is not None else ""

    async def end(self) -> None:
        """No request is answered any more, and those under way are cancelled. The record says how the rollout ended. Another
        end changes nothing; it waits for the first.
        """
        self.ended = True
        self.ctx.gives_up = False
        async with self._ending:
            if not self.over:
                await self._conclude()
                self.over = True

    async def _conclude(self) -> None:
        calls = [call for same in self._calls.values() for call in same]
        await asyncio.gather(*(call.cancel() for call in calls))
        undelivered = sum(call.replayable and not call.delivered for call in calls)
        if undelivered:
            self.count("policy/undelivered", undelivered)
        reason = self._last.generation.finish_reason if self._last is not None else ""
        self.record.finish_reason = "length" if self.exhausted else reason
        self.record.truncated = self.exhausted or reason == "length"

    def count(self, key: str, n: int = 1) -> None:
        self.record.metrics[key] = self.record.metrics.get(key, 0.0) + n


def _aborted(generation: Generation) -> Generation:
    """As it stands in the record until it is delivered."""
    return replace(generation, finish_reason="abort")


def _as_asked(ours: Sampling, wishes: Mapping[str, Any]) -> Sampling:
    """The request's own values where it gave any. Raises BadAskError."""
    asked = {name: wishes[name] for name in ENGINE_WISHES if wishes.get(name) is not None}
    return replace(ours, **asked, json_schema=json_schema(wishes[FORMAT]) if FORMAT in wishes else None)


def _fits(call: ToolCall, objects_only: bool) -> bool:
    """Whether a call can be said. vLLM's parsers also find ones that are nested too deep to be echoed."""
    return not (objects_only and call.arguments is None) and json_fault(call.raw) is None


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """(the text before the first stop string, that string)."""
    found = min(((at, stop) for stop in stops if stop and (at := text.find(stop)) >= 0), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    try:
        read = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return None
    return read if math.isfinite(read) else None


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Whoever attended has seen the error; one that nobody attended is not to be logged."""
    if not task.cancelled():
        task.exception()


def fingerprint(body: Mapping[str, Any], route: str) -> str:
    """Equal for equal requests, and short: a rollout keeps those of all its requests, which hold its pictures again and again."""
    return hashlib.blake2b((route + json.dumps(body, sort_keys=True)).encode()).hexdigest()
