"""An engine that answers from a script: for what a real one cannot produce on demand (exact tokens, aborts, hangs)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Generation, GenerationRequest, Health, Memory, PauseMode, Span
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

    After `sleep` the calls that bring it back are accepted in their right order alone. `requests` holds every admitted request;
    `calls` the name and arguments of every `generate`, `pause`, `resume` and `update_weights` in order; with `record=False`
    both stay empty, for runs of any length. Between `pause` and `resume` no request is admitted, and replies under way are held
    back ("keep"), awaited ("wait") or aborted ("abort", also those held back by an earlier "keep"). A reply without `versions`
    carries the version at the moment it is given out.
    """

    def __init__(self, script: Script, version: int = 0, *, record: bool = True) -> None:
        self.version = version
        self._record = record
        self._asleep: set[str] = set()
        self.requests: list[GenerationRequest] = []
        self.calls: list[tuple[Any, ...]] = []
        self._script = script
        self._served = 0
        self._running: set[asyncio.Event] = set()
        self._waiting = 0
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._admitted()
        if self._record:
            self.requests.append(request)
        self._note("generate", request.request_id)
        aborted = asyncio.Event()
        self._running.add(aborted)
        self._idle.clear()
        try:
            return await self._unless(aborted, self._answer(request))
        finally:
            self._running.remove(aborted)
            if not self._running:
                self._idle.set()

    def _note(self, *call: Any) -> None:
        if self._record:
            self.calls.append(call)

    async def _admitted(self) -> None:
        self._waiting += 1
        try:
            while not self._admitting.is_set():
                await self._admitting.wait()
        finally:
            self._waiting -= 1

    async def _unless(self, aborted: asyncio.Event, answer: Coroutine[Any, Any, Generation]) -> Generation:
        """The answer, or an aborted generation when `aborted` is set first."""
        answering, aborting = asyncio.ensure_future(answer), asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({answering, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else Generation((), (), (), "abort")
        finally:
            answering.cancel()
            aborting.cancel()

    async def _answer(self, request: GenerationRequest) -> Generation:
        reply = await self._next(request)
        if reply.hang:
            await asyncio.Event().wait()
        if reply.delay_s > 0:
            await asyncio.sleep(reply.delay_s)
        while not self._flowing.is_set():
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

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return parse_hermes(text)

    async def pause(self, mode: PauseMode) -> None:
        self._note("pause", mode)
        self._admitting.clear()
        if mode == "keep":
            self._flowing.clear()
            return
        if mode == "wait":
            self._flowing.set()
        else:
            for aborted in self._running:
                aborted.set()
        await self._idle.wait()

    async def resume(self) -> None:
        if self._asleep:
            raise EngineError(f"resume is called with {', '.join(sorted(self._asleep))} still missing")
        self._note("resume")
        self._flowing.set()
        self._admitting.set()

    async def update_weights(self, source: Any, version: int) -> None:
        if self._asleep:
            if "weights" in self._asleep or "kv_cache" not in self._asleep:
                raise EngineError("weights are loaded between wake('weights') and wake('kv_cache')")
            self._asleep.discard("loading")
        self._note("update_weights", version)
        self.version = version

    async def sleep(self) -> None:
        """Raises EngineError where a real engine would lose requests."""
        if self._admitting.is_set() or self._running:
            raise EngineError("sleep is called paused, with nothing running")
        self._note("sleep")
        self._asleep = {"weights", "loading", "kv_cache"}

    async def wake(self, memory: Memory) -> None:
        self._note("wake", memory)
        self._asleep.discard(memory)

    async def health(self) -> Health:
        return Health(ok=True, version=self.version, running=len(self._running), waiting=self._waiting)


def spans_of(versions: Sequence[int]) -> tuple[Span, ...]:
    """Runs of equal versions, as spans that cover [0, len)."""
    spans: list[Span] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, i + 1)
        else:
            spans.append(Span(version, i, i + 1))
    return tuple(spans)
