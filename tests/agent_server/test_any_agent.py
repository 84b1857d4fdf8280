"""Whatever an agent does over HTTP, every token of a reply that it was given is trained once, where it was sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from agentrl import FunctionExecutor, Limits, Renderer, Reply, ScriptedEngine, Task, Trajectory, run_episode

from ..core.sampled import END, TOKENIZER, Sample, logprobs_of, spelled, trained_samples
from .any_agent import AnyAgent
from .conftest import CALL

WORDS = ["an", "the ans er", CALL, f"{CALL}\n{CALL}", "<tool_call>{broken</tool_call>", ""]
LONG = "and so on " * 20
DOES = ["append", "append", "edit", "compact", "branch", "parallel", "retry", "cancel", "leave", "sip", "n"]
STEPS = st.lists(st.tuples(st.sampled_from(DOES), st.integers(0, 10**6)), min_size=1, max_size=10)
WIDE = Limits(max_turns=10_000, max_new_tokens=400, max_len=10**6, max_total_tokens=10**7)


class Lives:
    """One policy server for many lives of the agent."""

    def __init__(self) -> None:
        self.renderer = Renderer(TOKENIZER)
        self.executor = FunctionExecutor(self._live)

    async def live(self, steps: list[tuple[str, int]], words: list[int]) -> Trajectory:
        """One life; asserts what holds for all of them."""
        self.steps, self.words = steps, words
        self.sampled: list[Sample] = []
        self.agent: AnyAgent | None = None
        engine = ScriptedEngine(self._reply)
        record = await run_episode(self.executor, engine, self.renderer, Task("t"), limits=WIDE)
        if record.error is not None:
            raise record.error
        assert self.agent is not None
        assert trained_samples(record, self.sampled) == sorted(self.agent.delivered)
        assert (await engine.health()).running == 0
        return record

    async def _live(self, task: Task, client: AsyncOpenAI) -> None:
        self.agent = AnyAgent(client, lambda: len(self.sampled))
        for what, dice in self.steps:
            await self.agent.step(what, dice)

    def _reply(self, request: Any) -> Reply:
        number = len(self.sampled)
        leaving = self.agent is not None and self.agent.leaving
        word = LONG if leaving else WORDS[self.words[number % len(self.words)]]
        ids = (*spelled(f"s{number} {word}"), END)
        self.sampled.append((request.token_ids, ids))
        return Reply(ids, logprobs_of(number, len(ids)), delay_s=0.05 if leaving else 0.001)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_every_token_of_a_delivered_reply_is_trained_once_in_its_context(loop: str) -> None:
    """On uvloop too, which Ray's processes run."""
    lives, make_loop = Lives(), pytest.importorskip(loop).new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:

        @settings(max_examples=10, deadline=None)
        @given(STEPS, st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=6))
        def live(steps: list[tuple[str, int]], words: list[int]) -> None:
            runner.run(lives.live(steps, words))

        live()
        runner.run(lives.executor.close())


async def test_one_conversation_in_three_dialects_is_one_row() -> None:
    """Whichever API the next turn goes through, it continues the same tokens."""
    lives = Lives()
    record = await lives.live([("append", 0), ("append", 3 * 10 + 1), ("append", 3 * 10 + 2)], [3, 2, 0])
    await lives.executor.close()
    assert len(record.rows()) == 1 and "renderer/branches" not in record.metrics
