"""An engine that answers from a script: for what a real one cannot produce on demand (exact tokens, aborts, hangs)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Generation, GenerationRequest, Health, PauseMode, Span
from ..errors import EngineError
from ..messages import ToolCall
from .hermes import parse_hermes


@dataclass(frozen=True)
class Reply:
    """One scripted generation. `versions` is one version per token (default: the engine's); `error` is raised instead."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    finish_reason: str = "stop"
    delay_s: float = 0.0
    error: BaseException | str | None = None
    hang: bool = False


Script = Sequence[Reply] | Callable[[GenerationRequest], Any]


class ScriptedEngine:
    """Replies in request order from a list, or from `fn(request) -> Reply` (plain or async).

    `requests` holds every admitted request, `calls` the name and arguments of every call in order. Between `pause` and
    `resume` no request is admitted, and replies under way are held back ("keep"), awaited ("wait") or aborted ("abort").
    """

    def __init__(self, script: Script, version: int = 0) -> None:
        self.version = version
        self.requests: list[GenerationRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self._script = script
        self._served = 0
        self._running = 0
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborting = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._admitting.wait()
        self.requests.append(request)
        self.calls.append(("generate", request.request_id))
        self._running += 1
        self._idle.clear()
        try:
            return await self._answer(request)
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    async def _answer(self, request: GenerationRequest) -> Generation:
        reply = await self._next(request)
        if await self._aborted_during(reply):
            return Generation((), (), (), "abort")
        await self._flowing.wait()
        if reply.error is not None:
            raise reply.error if isinstance(reply.error, BaseException) else EngineError(reply.error)
        ids = tuple(int(i) for i in reply.token_ids)
        logprobs = tuple(reply.logprobs) if reply.logprobs is not None else (0.0,) * len(ids)
        versions = list(reply.versions) if reply.versions is not None else [self.version] * len(ids)
        return Generation(ids, logprobs, spans_of(versions), reply.finish_reason)

    async def _next(self, request: GenerationRequest) -> Reply:
        if callable(self._script):
            reply = self._script(request)
            return await reply if inspect.isawaitable(reply) else reply
        if self._served >= len(self._script):
            raise EngineError(f"the script has {len(self._script)} replies and was asked for one more")
        self._served += 1
        return self._script[self._served - 1]

    async def _aborted_during(self, reply: Reply) -> bool:
        """Wait out the reply's delay; True when `pause("abort")` came first."""
        if not reply.hang and reply.delay_s <= 0:
            return False
        try:
            await asyncio.wait_for(self._aborting.wait(), None if reply.hang else reply.delay_s)
        except TimeoutError:
            return False
        return True

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return parse_hermes(text)

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(("pause", mode))
        self._admitting.clear()
        if mode == "keep":
            self._flowing.clear()
            return
        if mode == "abort":
            self._aborting.set()
        await self._idle.wait()
        self._aborting.clear()

    async def resume(self) -> None:
        self.calls.append(("resume",))
        self._flowing.set()
        self._admitting.set()

    async def update_weights(self, source: Any, version: int) -> None:
        self.calls.append(("update_weights", version))
        self.version = version

    async def health(self) -> Health:
        return Health(ok=True, version=self.version, running=self._running)


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Runs of equal versions, as spans that cover [0, len)."""
    spans: list[Span] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, i + 1)
        else:
            spans.append(Span(version, i, i + 1))
    return tuple(spans)
