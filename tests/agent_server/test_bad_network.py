"""Bad networks between trainer, agent servers, policy server and reward servers: every episode ends once, with one agent's
tokens.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import pytest
from agentrl.agent_server import agent_app, agent_servers
from agentrl.agent_server.executors import AgentOptions
from agentrl.agent_server.listen import bind, listening
from agentrl.agent_server.policy_host import Listening
from openai import AsyncOpenAI

from agentrl import Limits, RemoteAgentExecutor, Renderer, Reply, ScriptedEngine, Task, Trajectory, run_episode
from agentrl.reward_client import served_reward

from ..bad_network import bad_network
from ..core.sampled import END, TOKENIZER, Sample, logprobs_of, spelled, trained_samples
from .test_reward_server import serving

EPISODES, TURNS = 16, 3
WIDE = Limits(max_turns=100, max_new_tokens=100, max_len=10**5, max_total_tokens=10**6, episode_timeout_s=60)


class Field:
    """Plays episodes as a worker does: a lost attempt is repeated. Every key's agents and what they received are noted."""

    def __init__(self) -> None:
        self.renderer = Renderer(TOKENIZER)
        self.runs: defaultdict[str, int] = defaultdict(int)
        self.received: defaultdict[str, list[str]] = defaultdict(list)
        self.policy = ""
        self.attempts = 0

    async def run(self, task: Task, client: AsyncOpenAI) -> dict[str, Any]:
        """The agent: TURNS turns through the bad network. It gives up on nothing."""
        key = client.api_key
        self.runs[key] += 1
        client = client.copy(base_url=f"{self.policy}/v1", max_retries=30, timeout=1.0)
        messages: list[Any] = [{"role": "user", "content": task.id}]
        for _ in range(TURNS):
            reply = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
            self.received[key].append(reply.content or "")
            messages += [reply, {"role": "user", "content": "go on"}]
        return {"reward": float(task.id), "metrics": {"turns": TURNS}}

    async def played(self, executor: RemoteAgentExecutor, task: Task) -> Trajectory:
        for _ in range(20):
            sampled: list[Sample] = []

            def reply(request: Any, sampled: list[Sample] = sampled) -> Reply:
                number = len(sampled)
                ids = (*spelled(f"{task.id}-{number}"), END)
                sampled.append((request.token_ids, ids))
                return Reply(ids, logprobs_of(number, len(ids)), delay_s=0.005)

            self.attempts += 1
            engine = ScriptedEngine(reply)
            record = await run_episode(executor, engine, self.renderer, task, limits=WIDE, seed=int(task.id))
            if record.error is None:
                self._check(record, sampled)
                return record
            assert getattr(record.error, "retryable", False), record.error
        raise AssertionError("an episode never ended")

    def _check(self, record: Trajectory, sampled: list[Sample]) -> None:
        """What is trained is what one agent received, in its order."""
        said = [m["content"] for m in record.messages if m["role"] == "assistant"]
        (key,) = [key for key, replies in self.received.items() if replies == said]
        assert self.runs[key] == 1
        numbers = sorted(int(text.partition("-")[2]) for text in said)
        assert len(said) == TURNS and trained_samples(record, sampled) == numbers


async def test_every_episode_is_played_by_one_agent_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_servers, "BACKOFF_S", (0.01, 0.02, 0.05, 0.1, 0.1))
    monkeypatch.setattr(agent_servers, "POLL_S", 0.3)
    monkeypatch.setattr(agent_servers, "ANSWER_S", 0.3)
    monkeypatch.setattr(agent_servers, "AVOID_S", 0.1)
    field = Field()
    async with AsyncExitStack() as stack:
        networks, urls = [], []
        for seed in (1, 2):
            own = await stack.enter_async_context(listening(agent_app(field.run), bind("127.0.0.1", 0), "off"))
            network, url = await stack.enter_async_context(bad_network(own, seed))
            networks.append(network)
            urls.append(url)
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        listener.close()
        network, field.policy = await stack.enter_async_context(bad_network(f"http://127.0.0.1:{port}", 3))
        options = AgentOptions(Listening(f"127.0.0.1:{port}"))
        executor = RemoteAgentExecutor(urls, options)
        tasks = [Task(f"{i}") for i in range(EPISODES)]
        records = await asyncio.gather(*(field.played(executor, task) for task in tasks))
        await executor.close()
    assert [record.total_reward for record in records] == [float(i) for i in range(EPISODES)]
    faults = sum((one.faults for one in (*networks, network)), start=type(network.faults)())
    assert {"answer cut", "answer swallowed", "delay", "request cut"} <= set(faults)


async def test_every_completion_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.reward_client.TIMEOUT_S", 0.5)

    async def length(completion: str) -> float:
        return float(len(completion))

    async with (
        serving(length) as (one, _),
        serving(length) as (two, _),
        bad_network(one, 1) as (network, first),
        bad_network(two, 2) as (_, second),
    ):
        ask = served_reward(f"{first},{second}", None)
        answers = await asyncio.gather(*(ask("p", "x" * n, None) for n in range(60)))
    assert [answer["reward"] for answer in answers] == [float(n) for n in range(60)]
    assert network.faults
