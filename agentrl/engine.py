"""The Engine interface: token ids in, sampled ids with log-probabilities and weight versions out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .messages import Image, ToolCall

PauseMode = Literal["keep", "wait", "abort"]
Memory = Literal["weights", "kv_cache"]
"""What of an engine's device memory `wake` brings back."""


@dataclass(frozen=True)
class Sampling:
    """How one turn is sampled. Every field is sent to the engine; nothing is taken from the checkpoint's defaults.

    `top_p`, `top_k` (0 = off) and `min_p` change the distribution: they are for evaluation, training refuses them. `json_schema`
    (JSON text; vLLM alone heeds it) is what the reply must fit: for a policy that is served.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    json_schema: str | None = None


@dataclass(frozen=True)
class Limits:
    """The bounds of an episode, in turns, tokens and seconds. `max_total_tokens` None = max_turns * max_new_tokens."""

    max_turns: int = 16
    max_new_tokens: int = 256
    max_len: int = 4096
    max_total_tokens: int | None = None
    call_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0

    @property
    def total_tokens(self) -> int:
        return self.max_turns * self.max_new_tokens if self.max_total_tokens is None else self.max_total_tokens

    @property
    def longest_s(self) -> float:
        """Seconds until an episode whose env does not let go of it has come to its end."""
        return self.episode_timeout_s + self.call_timeout_s


@dataclass(frozen=True)
class Span:
    """Generated tokens [start, end) were sampled by the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class GenerationRequest:
    """One turn to sample. `token_ids` hold every image placeholder expanded; `images` are in their order of appearance."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    images: tuple[Image, ...] = ()
    request_id: str = ""
    episode_id: str = ""


@dataclass(frozen=True)
class Generation:
    """What was sampled; a sampled stop token is included.

    `logprobs[i]` = log-softmax(logits / temperature) of `token_ids[i]`; `version_spans` cover [0, len) without gap or
    overlap; `finish_reason` is stop | length | abort (aborted tokens are recorded, never trained).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[Span, ...]
    finish_reason: str

    def fault(self) -> str | None:
        """What does not fit together, in words; None when all does."""
        n = len(self.token_ids)
        if len(self.logprobs) != n:
            return f"{n} sampled tokens but {len(self.logprobs)} log-probabilities"
        if not all(map(math.isfinite, self.logprobs)):
            return "a log-probability is not finite"
        edges = [0, *(span.end for span in self.version_spans)]
        if [span.start for span in self.version_spans] != edges[:-1] or edges[-1] != n:
            return f"version spans {self.version_spans} do not cover {n} tokens"
        return None


@dataclass(frozen=True)
class Health:
    """A snapshot of an engine. `kv_usage` is the share of the KV cache in use; `preemptions` counts since the start;
    `answered` = the engine said so itself.
    """

    ok: bool
    version: int
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    detail: str = ""
    answered: bool = True


class Engine(Protocol):
    """What samples. All methods may be called concurrently; between `pause` and `resume` no request is admitted.

    `pause("keep")` freezes running requests, "wait" lets them finish, "abort" ends them with finish_reason "abort".
    `update_weights` is called paused, and `version` moves only after the new weights are in.
    """

    version: int

    async def generate(self, request: GenerationRequest) -> Generation: ...

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, source: Any, version: int) -> None: ...

    async def health(self) -> Health: ...


class SleepingEngine(Engine, Protocol):
    """An engine that can leave its device to the trainer.

    `sleep` is called paused with nothing running, and gives up the device's memory, weights included. What is awake again is
    empty: `wake("weights")`, `update_weights`, `wake("kv_cache")`, `resume`, in this order.
    """

    async def sleep(self) -> None: ...

    async def wake(self, memory: Memory) -> None: ...
