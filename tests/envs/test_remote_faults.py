"""A bad network between `RemoteEnv` and its server: whatever is lost, delayed or cut, no step is taken twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from agentrl.agent_server.env_app import env_app
from agentrl.agent_server.listen import bind, listening
from agentrl.envs.env_client import EnvClient
from agentrl.envs.remote import RemoteEnv

from agentrl import Action, Env, Task

from ..bad_network import bad_network

EPISODES = 12
STEPS = 15


class Ledger(Env):
    """Writes down every step it takes."""

    max_turns = STEPS
    taken: Counter[tuple[str, int]] = Counter()
    resets: Counter[str] = Counter()
    open = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        self.turn = 0
        type(self).resets[self.task.id] += 1
        type(self).open += 1
        return self.task.id, {}

    async def step(self, action: Any) -> Any:
        self.taken[self.task.id, self.turn] += 1
        self.turn += 1
        await asyncio.sleep(0.002 * (self.turn % 3))
        return f"{self.turn} after {action}", float(self.turn), self.turn == STEPS, False, {}

    async def close(self) -> None:  # type: ignore[override]
        type(self).open -= hasattr(self, "turn")


@pytest.mark.parametrize("transport", ["stream", "http"])
async def test_every_step_is_taken_once(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger.taken.clear()
    Ledger.resets.clear()
    if transport == "http":
        monkeypatch.setattr(EnvClient, "_connected", _nothing)

    async def play(env: RemoteEnv, name: str) -> list[Any]:
        opening, _ = await env.reset(seed=0, options={"task": Task(name)})
        said = [opening]
        for turn in range(STEPS):
            observation, reward, ended, _, _ = await env.step(Action(f"{name} {turn}"))
            said.append((observation, reward, ended))
        await env.close()
        return said

    async with (
        listening(env_app({"ledger": Ledger}), bind("127.0.0.1", 0)) as own,
        bad_network(own, seed=7) as (network, url),
    ):
        network.on = False
        envs = [await asyncio.to_thread(RemoteEnv, url) for _ in range(EPISODES)]
        for env in envs:
            env.link = envs[0].link
        client = envs[0].link.take()
        client.resend = 0.3
        network.on = True
        episodes = await asyncio.gather(*(play(env, f"t{i}") for i, env in enumerate(envs)))
        network.on = False
        await envs[0].link.give_back(client)
    for i, said in enumerate(episodes):
        name = f"t{i}"
        turns = [(f"{k + 1} after {name} {k}", float(k + 1), k + 1 == STEPS) for k in range(STEPS)]
        assert said == [name, *turns]
    assert set(Ledger.taken.values()) == {1}
    assert len(Ledger.taken) == EPISODES * STEPS
    assert set(Ledger.resets.values()) == {1}
    assert Ledger.open == 0
    assert {"answer cut", "answer swallowed", "delay", "request cut"} <= set(network.faults)


async def _nothing(client: EnvClient) -> None:
    return None
