"""The policy's side of a rollout: which context a request stands in, what is trained, what is replayed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Limits, Renderer, Reply, RolloutContext, Sampling, ScriptedEngine, Task, Trajectory
from agentrl.policy_ask import Ask, BadAskError, ContextLengthError, SessionEndedError, chain
from agentrl.policy_call import Call, Turn
from agentrl.policy_session import PolicySession, fingerprint
from agentrl.reward import Verdict

from .sampled import END, TOKENIZER, Sample, logprobs_of, sample_number, spelled, trained_samples
from .templates import TOOL

RENDERER = Renderer(TOKENIZER)
WIDE = Limits(max_turns=10_000, max_new_tokens=64, max_len=10**6, max_total_tokens=10**6)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Rollout:
    """A session on a scripted engine; `say(i)` is the text of the i-th request's reply."""

    def __init__(self, say: Callable[[int], str], *, limits: Limits = WIDE, sampling: Any = "force", **reply: Any):
        self.sampled: list[Sample] = []
        self.say, self.reply = say, reply
        self.engine = ScriptedEngine(self._script)
        self.record = Trajectory(Task("t"))
        self.warned: list[str] = []
        ctx = RolloutContext(self.engine, RENDERER, Sampling(max_new_tokens=limits.max_new_tokens), limits, seed=1)
        self.session = PolicySession(ctx, self.record, sampling=sampling, warn=self.warned.append)

    def _script(self, request: Any) -> Reply:
        i = len(self.sampled)
        ids = (*spelled(self.say(i)), END)
        self.sampled.append((request.token_ids, ids))
        return Reply(ids, logprobs_of(i, len(ids)), **self.reply)

    def ask(self, *messages: Any, fingerprint: str = "", **options: Any) -> Call:
        retry = {name: options.pop(name) for name in ("retried", "key") if name in options}
        return self.session.ask(Ask(tuple(messages), **options), fingerprint, **retry)

    async def turns(self, *messages: Any, **options: Any) -> list[Turn]:
        """Asked, sampled and delivered."""
        call = self.ask(*messages, **options)
        async with call.attended():
            turns = await call.turns()
            call.deliver()
        return turns

    async def turn(self, *messages: Any, **options: Any) -> Turn:
        return (await self.turns(*messages, **options))[0]

    def trained(self) -> list[int]:
        return trained_samples(self.record, self.sampled)

    @property
    def all(self) -> list[int]:
        return list(range(len(self.sampled)))


def echoed(turn: Turn) -> dict[str, Any]:
    return turn.message


async def test_an_appended_conversation_is_one_row_and_nothing_sampled_is_encoded_again() -> None:
    rollout = Rollout(["the ans", "then", "ll"].__getitem__)
    one = await rollout.turn(user("a"))
    two = await rollout.turn(user("a"), echoed(one), user("b"))
    await rollout.turn(user("a"), echoed(one), user("b"), echoed(two), user("c"))
    (row,) = rollout.record.rows()
    assert rollout.trained() == rollout.all
    first, second, third = (context for context, _ in rollout.sampled)
    assert second[: len(first)] == first and second[len(first) :][:8] == (*spelled("the ans"), END)
    assert third[: len(second)] == second and len(row) == len(third) + 3
    assert "renderer/branches" not in rollout.record.metrics


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "an answer"},
        {"role": "assistant", "content": [{"type": "text", "text": "an "}, {"type": "text", "text": "answer"}]},
        {"role": "assistant", "content": "an answer", "tool_calls": None, "refusal": None, "name": None},
    ],
)
async def test_an_echo_in_another_form_is_the_same_reply(echo: dict[str, Any]) -> None:
    rollout = Rollout(["an answer", "b"].__getitem__)
    await rollout.turn(user("a"))
    from agentrl.messages import as_message

    await rollout.turn(user("a"), as_message(echo), user("b"))
    assert len(rollout.record.rows()) == 1


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "an answer."},
        {"role": "assistant", "content": "an answer", "reasoning_content": "because"},
        {"role": "user", "content": "an answer"},
    ],
)
async def test_a_rewritten_reply_branches_and_both_are_trained(echo: dict[str, Any]) -> None:
    rollout = Rollout(["an answer", "b"].__getitem__)
    await rollout.turn(user("a"))
    await rollout.turn(user("a"), echo, user("b"))
    assert len(rollout.record.rows()) == 2
    assert rollout.trained() == rollout.all
    assert rollout.record.metrics.get("renderer/branches", 0) == (echo["role"] == "assistant")


async def test_history_rewritten_late_keeps_the_prefix_before_it() -> None:
    rollout = Rollout("abcd".__getitem__)
    one = await rollout.turn(user("1"))
    await rollout.turn(user("1"), echoed(one), user("2"))
    await rollout.turn(user("1"), echoed(one), user("other"))
    first, second, third = (context for context, _ in rollout.sampled)
    shared = (*first, *spelled("a"), END)
    assert second[: len(shared)] == third[: len(shared)] == shared
    assert [int(row.loss_mask.sum()) for row in rollout.record.rows()] == [4, 2]


CALL = '<tool_call>{"name": "add", "arguments": {"b": 2.0, "a": [1, true]}}</tool_call>'


async def test_calls_are_matched_by_their_arguments_as_values() -> None:
    rollout = Rollout([CALL, "three", "b"].__getitem__)
    turn = await rollout.turn(user("a"), tools=(TOOL,))
    (call,) = turn.calls
    assert turn.finish == "tool_calls" and call.arguments == {"b": 2.0, "a": [1, True]}
    function = {"name": "add", "arguments": {"a": [1, True], "b": 2}}
    echo = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    await rollout.turn(user("a"), echo, result, tools=(TOOL,))
    assert len(rollout.record.rows()) == 1
    function["arguments"] = {"a": [1, 1], "b": 2}
    await rollout.turn(user("a"), echo, result, tools=(TOOL,))
    assert len(rollout.record.rows()) == 2


async def test_what_is_no_call_is_sent_as_the_text_it_is() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a":</tool_call>'
    rollout = Rollout([f"so {broken}", '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'].__getitem__)
    turn = await rollout.turn(user("a"), tools=(TOOL,))
    assert turn.calls == () and '"arguments": {"a":' in turn.content and turn.finish == "stop"
    listed = await rollout.turn(user("b"), tools=(TOOL,))
    assert [call.raw for call in listed.calls] == ["[1]"]
    assert rollout.record.metrics["policy/malformed_calls"] == 1


async def test_without_tool_choice_calls_stay_text() -> None:
    turn = await Rollout([CALL].__getitem__).turn(user("a"), tools=(TOOL,), parse_calls=False)
    assert turn.calls == () and turn.content == CALL


async def test_a_stop_string_cuts_the_text_and_the_echo_of_it_matches() -> None:
    rollout = Rollout(["one END two", "b"].__getitem__)
    turn = await rollout.turn(user("a"), stop=("END",))
    assert (turn.content, turn.stop) == ("one ", "END")
    assert rollout.engine.requests[0].sampling.stop == ("END",)
    await rollout.turn(user("a"), echoed(turn), user("b"))
    (row,) = rollout.record.rows()
    assert rollout.trained() == rollout.all and row.loss_mask.sum() == 12 + 2


async def test_siblings_share_their_prompt_and_all_are_trained() -> None:
    rollout = Rollout("aab".__getitem__)
    turns = await rollout.turns(user("1"), n=3)
    assert [turn.content for turn in turns] == ["a", "a", "b"]
    assert len({id(turn.node.parent) for turn in turns}) == 1
    assert rollout.trained() == rollout.all
    assert len({request.sampling.seed for request in rollout.engine.requests}) == 3


# ---------------------------------------------------------------------- retries and cancellations


async def test_only_a_retry_is_replayed() -> None:
    rollout = Rollout("abcdef".__getitem__)
    first = await rollout.turn(user("1"), fingerprint="x")
    assert await rollout.turn(user("1"), fingerprint="x", retried=True) is first
    again = await rollout.turn(user("1"), fingerprint="x")
    assert again is not first and again.content == "b"
    keyed = await rollout.turn(user("1"), fingerprint="x", key="k")
    assert await rollout.turn(user("1"), fingerprint="x", key="k") is keyed
    with pytest.raises(BadAskError, match="Idempotency-Key"):
        rollout.ask(user("2"), fingerprint="y", key="k")
    assert (await rollout.turn(user("3"), fingerprint="z", retried=True)).content == "d"
    assert rollout.record.metrics["policy/replayed"] == 2
    assert rollout.trained() == rollout.all


async def test_a_reply_that_was_not_delivered_is_replayed_and_then_trained() -> None:
    rollout = Rollout("ab".__getitem__)
    call = rollout.ask(user("1"), fingerprint="x")
    async with call.attended():
        await call.turns()
    assert rollout.trained() == []
    assert (await rollout.turn(user("1"), fingerprint="x")).content == "a"
    assert rollout.trained() == rollout.all and len(rollout.sampled) == 1


async def test_a_retry_joins_the_call_that_still_runs() -> None:
    rollout = Rollout("ab".__getitem__, delay_s=0.02)
    call = rollout.ask(user("1"), fingerprint="x")
    same = rollout.ask(user("1"), fingerprint="x", retried=True)
    other = rollout.ask(user("1"), fingerprint="x")
    assert same is call and other is not call

    async def leave_early() -> None:
        async with call.attended():
            await asyncio.sleep(0)

    await asyncio.gather(leave_early(), _delivered(same), _delivered(other))
    assert len(rollout.trained()) == 2


async def _delivered(call: Call) -> None:
    async with call.attended():
        await call.turns()
        call.deliver()


async def test_who_leaves_cancels_the_engine_and_the_tokens_are_never_trained() -> None:
    rollout = Rollout("abc".__getitem__, hang=True)
    call = rollout.ask(user("1"), fingerprint="x", n=2)
    async with call.attended():
        await asyncio.sleep(0.01)
    with pytest.raises(SessionEndedError):
        await call.turns()
    assert (await rollout.engine.health()).running == 0 and rollout.session.ctx.waiting_for == []
    assert rollout.record.metrics["policy/cancelled"] == 2 and rollout.record.rows() == []
    aborted = [node for node in rollout.record.nodes if node.generation is not None]
    assert [node.generation.finish_reason for node in aborted if node.generation] == ["abort", "abort"]
    rollout.reply.clear()
    assert (await rollout.turn(user("1"), fingerprint="x", retried=True)).content == "c"


async def test_an_engine_that_fails_leaves_nothing_trained_and_is_named() -> None:
    rollout = Rollout("ab".__getitem__, error="no luck")
    call = rollout.ask(user("1"))
    async with call.attended():
        with pytest.raises(Exception, match="no luck"):
            await call.turns()
    assert rollout.session.failure is not None and rollout.record.metrics["policy/failed"] == 1
    rollout.reply.clear()
    await rollout.turn(user("1"))
    assert rollout.session.failure is None


# ---------------------------------------------------------------------- budgets, sampling, rewards, the end


@pytest.mark.parametrize(
    ("limits", "first"),
    [
        (Limits(max_turns=1, max_new_tokens=8), True),
        (Limits(max_turns=9, max_new_tokens=8, max_total_tokens=2), True),
        (Limits(max_turns=9, max_new_tokens=8, max_len=20), False),
    ],
)
async def test_over_the_budget_nothing_is_sampled(limits: Limits, first: bool) -> None:
    rollout = Rollout("ab".__getitem__, limits=limits)
    messages = [user("1")]
    if first:
        messages += [echoed(await rollout.turn(*messages)), user("2")]
    with pytest.raises(ContextLengthError, match="context_length_exceeded"):
        rollout.ask(*messages)
    await rollout.session.end()
    assert len(rollout.sampled) == first and rollout.record.truncated and rollout.record.finish_reason == "length"


async def test_calls_at_once_share_the_token_budget() -> None:
    """Each reserves what it may sample, siblings equal parts; what is not needed is given back, by cancelled calls too."""
    rollout = Rollout(
        "abcdefghi".__getitem__, limits=Limits(max_turns=99, max_new_tokens=10, max_total_tokens=25), delay_s=0.01
    )

    def allowed() -> list[int]:
        return [request.sampling.max_new_tokens for request in rollout.engine.requests]

    first, second = rollout.ask(user("1"), n=2), rollout.ask(user("2"), n=2)
    with pytest.raises(ContextLengthError, match="under way"):
        rollout.ask(user("3"), n=2)
    await second.cancel()
    for call in (first, rollout.ask(user("4"), max_tokens=3)):
        async with call.attended():
            await call.turns()
    assert allowed() == [10, 10, 3]
    await rollout.turn(user("5"), n=5, fingerprint="5")
    assert allowed()[3:] == [3] * 5 and rollout.session.ctx.budget(0) == 25 - 2 * 8


async def test_a_conversation_that_is_compacted_goes_on() -> None:
    rollout = Rollout("ab".__getitem__, limits=Limits(max_turns=9, max_new_tokens=8, max_len=100))
    with pytest.raises(ContextLengthError):
        rollout.ask(user("long " * 30))
    await rollout.turn(user("short"))
    await rollout.session.end()
    assert not rollout.record.truncated and rollout.record.finish_reason == "stop"


async def test_other_sampling_is_overruled_or_refused() -> None:
    wishes = {"temperature": 0.2, "top_p": 1.0, "seed": 3}
    forced = Rollout("ab".__getitem__)
    await forced.turn(user("1"), wishes=wishes, max_tokens=5)
    (request,) = forced.engine.requests
    assert request.sampling.temperature == 1.0 and request.sampling.max_new_tokens == 5
    assert len(forced.warned) == 1 and "agents set temperature;" in forced.warned[0]
    await forced.turn(user("2"), wishes={"temperature": 0.3})
    assert forced.warned[0] == forced.warned[1], "said once a run, whatever the values"
    strict = Rollout("ab".__getitem__, sampling="strict")
    with pytest.raises(BadAskError, match=r"temperature = 0\.2"):
        strict.ask(user("1"), wishes=wishes)
    await strict.turn(user("1"), wishes={"temperature": 1, "presence_penalty": 0, "top_k": -1, "min_tokens": 0})
    free = Rollout("ab".__getitem__, sampling="free")
    await free.turn(user("1"), wishes=wishes)
    assert free.engine.requests[0].sampling.temperature == 0.2


async def test_rewards_go_to_the_turn_before_them_and_add_up() -> None:
    rollout = Rollout("ab".__getitem__)
    with pytest.raises(BadAskError, match="none yet"):
        rollout.session.post_reward({"reward": 1.0})
    one = await rollout.turn(user("1"))
    rollout.session.post_reward({"reward": 0.5, "score": 1, "metrics": {"m": 2, "bad": "x", "huge": 10**400}}, "k")
    rollout.session.post_reward({"reward": 0.5}, "k")
    rollout.session.post_reward({"reward": 0.25})
    await rollout.turn(user("1"), echoed(one), user("2"))
    assert rollout.record.total_reward == 0.75 and rollout.record.score == 1.0
    (row,) = rollout.record.rows()
    assert row.rewards[one.node.end - 1] == 0.75 and row.rewards.sum() == 0.75
    assert rollout.record.metrics["m"] == 2.0 and "bad" not in rollout.record.metrics
    rollout.session.post_reward({"reward": None})
    assert rollout.record.total_reward is None
    rollout.session.judge(Verdict(2.0))
    assert rollout.record.total_reward == 2.0


async def test_a_reward_that_is_posted_again_by_a_retry_counts_once() -> None:
    rollout = Rollout(str)
    await rollout.turn(user("1"))
    for retried in (False, True, True, False):
        rollout.session.post_reward({"reward": 1.0}, retried=retried)
    rollout.session.post_reward({"reward": 0.5}, retried=True)
    await rollout.turn(user("2"))
    rollout.session.post_reward({"reward": 0.5}, retried=True)
    assert [row.rewards.sum() for row in rollout.record.rows()] == [2.5, 0.5]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "0.5", [1], 10**400])
async def test_a_posted_reward_that_is_no_number_is_no_verdict(reward: Any) -> None:
    rollout = Rollout("a".__getitem__)
    await rollout.turn(user("1"))
    rollout.session.post_reward({"reward": reward})
    assert rollout.record.total_reward is None


async def test_after_the_end_everything_is_refused_and_what_ran_is_cancelled() -> None:
    rollout = Rollout("ab".__getitem__, hang=True)
    call = rollout.ask(user("1"))
    waiting = asyncio.ensure_future(_delivered(call))
    await asyncio.sleep(0.01)
    await rollout.session.end()
    assert rollout.session.ctx.waiting_for == ["rollout-0"]
    with pytest.raises(SessionEndedError):
        await waiting
    for late in (lambda: rollout.ask(user("2")), lambda: rollout.session.post_reward({"reward": 1})):
        with pytest.raises(SessionEndedError):
            late()
    assert rollout.record.metrics["policy/after_end"] == 2


def test_what_stands_for_a_request_is_short_and_the_same_for_the_same_request() -> None:
    body = {"messages": [user("x" * 10**5)], "n": 1}
    assert fingerprint(body, "/a") == fingerprint(dict(reversed(body.items())), "/a")
    assert len({fingerprint(body, "/a"), fingerprint(body, "/b"), fingerprint({**body, "n": 2}, "/a")}) == 3
    assert len(fingerprint(body, "/a")) < 200


def test_the_chain_tells_conversations_apart() -> None:
    said: list[list[dict[str, Any]]] = [
        [user("a"), user("b")],
        [user("ab")],
        [{"role": "system", "content": "a"}, user("b")],
        [user("a"), {"role": "tool", "content": "b", "tool_call_id": "1"}],
        [user("a"), {"role": "tool", "content": "b", "tool_call_id": "2"}],
        [user("a"), {**user("b"), "name": "someone"}],
    ]
    ends = {chain(messages, tools)[-1] for messages in said for tools in ((), (TOOL,))}
    assert len(ends) == 2 * len(said)


# ---------------------------------------------------------------------- any agent at all

WORDS = ["an", "the", "ll", "ans er", CALL, f"{CALL}\n{CALL}", ""]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "edit", "compact", "branch", "parallel", "retry", "cancel", "drop", "n"]),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=14,
)


class RandomAgent:
    """Lives by dice. `delivered` = what the engine sampled for the replies it was given."""

    def __init__(self, words: list[int]) -> None:
        self.rollout = Rollout(lambda i: WORDS[words[i % len(words)]], delay_s=0.001)
        self.histories: list[list[dict[str, Any]]] = [[user("start")]]
        self.delivered: set[int] = set()
        self.bodies = 0

    async def step(self, what: str, dice: int) -> None:
        history = self.histories[dice % len(self.histories)]
        if what == "edit":
            history = self._edited(history, dice)
        elif what == "compact":
            history = [user(f"summary of {len(history)}")]
        elif what == "branch":
            history = [*history[: 1 + dice % len(history)], user("another way")]
        if what == "parallel":
            await asyncio.gather(*(self._turn([user(f"part {dice % 2}")], "append", dice + i) for i in range(3)))
        else:
            await self._turn(history, what, dice)

    def _edited(self, history: list[dict[str, Any]], dice: int) -> list[dict[str, Any]]:
        changed = dice % len(history)
        return [{**m, "content": "edited"} if i == changed else m for i, m in enumerate(history)]

    async def _turn(self, history: list[dict[str, Any]], what: str, dice: int) -> None:
        self.bodies += 1
        options: dict[str, Any] = {"fingerprint": str(self.bodies), "tools": (TOOL,) if dice % 3 else ()}
        if what == "n":
            options["n"] = 2 + dice % 2
        call = self.rollout.ask(*history, **options)
        if what in ("cancel", "drop"):
            async with call.attended():
                if what == "drop":
                    await call.turns()
                else:
                    await asyncio.sleep(0)
            if dice % 2:
                return
            call = self.rollout.ask(*history, **options, retried=bool(dice % 4))
        turns = await self._take(call)
        self.delivered |= {sample_number(turn.generation.logprobs[0]) for turn in turns}
        if what == "retry":
            assert await self._take(self.rollout.ask(*history, **options, retried=True)) == turns
        self.histories += [[*history, turn.message, *self._answers(turn, dice)] for turn in turns]

    async def _take(self, call: Call) -> list[Turn]:
        async with call.attended():
            turns = await call.turns()
            call.deliver()
        return turns

    def _answers(self, turn: Turn, dice: int) -> list[dict[str, Any]]:
        results = [{"role": "tool", "tool_call_id": call.id, "content": f"{dice % 9}"} for call in turn.calls]
        return (results[::-1] if dice % 2 else results) or [user(f"go on {dice % 3}")]


@settings(max_examples=60, deadline=None)
@given(STEPS, st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=8))
def test_every_token_of_a_delivered_reply_is_trained_once_in_its_context(steps: Any, words: list[int]) -> None:
    async def live() -> None:
        agent = RandomAgent(words)
        for what, dice in steps:
            await agent.step(what, dice)
        await agent.rollout.session.end()
        assert agent.rollout.trained() == sorted(agent.delivered)

    asyncio.run(live())
