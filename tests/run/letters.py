"""The environment of runs whose processes are killed: its episodes take their time, and any reply will do."""

from __future__ import annotations

from typing import Any

from agentrl import Env, GenerationRequest, Reply, Task


class Letters(Env):
    """`turns` turns, each worth 1 for an odd number of letters."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    @classmethod
    def tasks(cls, split: str) -> list[Task]:
        return [Task(str(i)) for i in range(50)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.turn = 0
        return f"task {self.task.id}", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return "go on", float(len(str(action)) % 2), self.turn == self.turns, False, {}


def reply(request: GenerationRequest) -> Reply:
    """By the seed of the request."""
    seed = request.sampling.seed or 0
    return Reply([65 + seed % 26] * (1 + seed % 2) + [258], [-3.0] * (2 + seed % 2), delay_s=0.2)


def uneven_reply(request: GenerationRequest) -> Reply:
    """The same after 0.05 to 1 s, so that episodes overtake each other."""
    said = reply(request)
    return Reply(said.token_ids, said.logprobs, delay_s=0.05 + (request.sampling.seed or 0) % 20 / 20)
