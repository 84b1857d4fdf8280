"""Episodes of agent functions against the scripted engine, over a real port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from agentrl.agent_server.executors import AgentOptions

from agentrl import FunctionExecutor, Limits, Renderer, Reply, Sampling, ScriptedEngine, Task, Trajectory, run_episode

from ..core.templates import FAMILIES
from ..core.tokenizers import FakeProcessor

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@dataclass
class Stage:
    """Plays agent functions. `says` = the texts that are sampled in turn, or (text, options of Reply)."""

    family: str = "chatml"
    says: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = FAMILIES[self.family].tokenizer()
        looks = self.family.startswith("vision")
        self.renderer = Renderer(FakeProcessor(self.tokenizer) if looks else self.tokenizer)
        self.engine = ScriptedEngine(self._script)
        self._said = 0

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _script(self, request: Any) -> Reply:
        said = self.says[self._said]
        self._said += 1
        text, options = said if isinstance(said, tuple) else (said, {})
        ids = self.ids(f"{text}<|im_end|>")
        return Reply(ids, [-0.5] * len(ids), **options)

    async def play(
        self,
        run: Callable[[Task, Any], Any],
        *says: Any,
        task: Task | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> Trajectory:
        """One episode of an agent function; raises what it failed with."""
        record = await self.played(FunctionExecutor(run, AgentOptions(**options)), *says, task=task, limits=limits)
        if record.error is not None:
            raise record.error
        return record

    async def played(
        self, executor: Any, *says: Any, task: Task | None = None, limits: Limits | None = None
    ) -> Trajectory:
        """One episode; its error is in the record."""
        self.says = [*self.says[: self._said], *says]
        limits = limits or Limits(max_new_tokens=200)
        sampling = Sampling(max_new_tokens=limits.max_new_tokens)
        return await run_episode(
            executor, self.engine, self.renderer, task or Task("t", "hi"), limits=limits, sampling=sampling
        )

    def trained(self, record: Trajectory) -> list[str]:
        """The trained text of every row, runs of it joined by '|'."""
        rows = []
        for row in record.rows():
            marked = [int(i) if on else None for i, on in zip(row.token_ids, row.loss_mask, strict=True)]
            text, run = [], []
            for token in [*marked, None]:
                if token is not None:
                    run.append(token)
                elif run:
                    text.append(self.tokenizer.decode(run).removesuffix("<|im_end|>"))
                    run = []
            rows.append("|".join(text))
        return rows


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def vision_stage() -> Stage:
    return Stage("vision")


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what another task does."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
