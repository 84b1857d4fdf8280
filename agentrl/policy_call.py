"""One request of an agent and its replies: who waits for them, and whether the agent has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .engine import Generation
from .messages import Message, ToolCall
from .policy_ask import SessionEndedError, arguments_value
from .renderer import Prompt
from .trajectory import Node

if TYPE_CHECKING:
    from .policy_session import PolicySession


@dataclass(eq=False)
class Turn:
    """One reply: `content` and `calls` as they are sent, `finish` stop | length | placeholder | tool_calls."""

    prompt: Prompt
    node: Node
    generation: Generation
    content: str
    calls: tuple[ToolCall, ...]
    stop: str | None
    """The stop string that cut the text."""
    link: bytes
    echoed: bool = False
    """The agent has said it again."""

    entry: Message | None = None
    """The message in the record, once it is delivered."""

    @property
    def finish(self) -> str:
        reason = self.generation.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def message(self) -> Message:
        """The reply as a chat message, arguments as JSON values."""
        return assistant_message(self.content, self.calls)


@dataclass(eq=False)
class Call:
    """One request and its replies. `deliver` is called whenever they have been sent in full: only then are they trained."""

    session: PolicySession
    fingerprint: str
    prompt_tokens: int
    _sampling: asyncio.Task[list[Turn]]
    _deliveries: int = 0
    _attending: int = 0

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[Call]:
        """While somebody waits for the replies. When the last one leaves too early, the engine's request is cancelled."""
        self._attending += 1
        try:
            yield self
        finally:
            self._attending -= 1
            if not self._attending:
                self._sampling.cancel()

    async def turns(self) -> list[Turn]:
        """The replies, `n` of them. Raises what sampling raised, SessionEndedError when the rollout ended meanwhile."""
        await asyncio.wait({self._sampling})
        if self._sampling.cancelled():
            raise SessionEndedError("the rollout ended before the reply was sampled")
        return self._sampling.result()

    def deliver(self) -> None:
        """The agent has all of it."""
        self._deliveries += 1
        if self._deliveries == 1:
            self.session.take_delivered(self._sampling.result())

    def withdraw(self) -> None:
        """One that was thought delivered turns out to have been broken off. What the agent has said again since, it had."""
        turns = self._sampling.result()
        if self.session.over or any(turn.echoed for turn in turns):
            return
        self._deliveries -= 1
        if not self.delivered:
            self.session.take_back(turns)

    @property
    def delivered(self) -> bool:
        return self._deliveries > 0

    @property
    def replayable(self) -> bool:
        """Under way or done; a cancelled or failed one has nothing to repeat."""
        sampling = self._sampling
        if not sampling.done():
            return not sampling.cancelling()
        return not sampling.cancelled() and sampling.exception() is None

    @property
    def dropped(self) -> bool:
        """Sampled, but the client left before it had everything."""
        return self.replayable and self._sampling.done() and not self.delivered and not self._attending

    async def cancel(self) -> None:
        self._sampling.cancel()
        await asyncio.wait({self._sampling})


def assistant_message(content: str, calls: tuple[ToolCall, ...]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_value(call.raw)},
            }
            for call in calls
        ]
    return message
