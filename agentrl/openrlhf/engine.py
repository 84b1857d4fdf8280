"""The `llm_engine` and `sampling_params` of an episode, as executors of OpenRLHF's format use them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine import Generation
from ..errors import AgentError
from ..executor import RolloutContext
from ..messages import Image
from .episodes import Episodes

NEUTRAL = {"top_p": 1.0, "top_k": (0, -1), "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""What leaves the distribution as it is: anything else is refused in training."""


@dataclass
class SamplingParams:
    """The attributes of vLLM's class that such files read and write. An object of vLLM's own is taken as well."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] | str | None = None
    seed: int | None = None
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `text` has its special tokens."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True)
class Call:
    """One sample and the context in which it was made."""

    prompt: tuple[int, ...]
    images: tuple[Image, ...]
    generation: Generation


@dataclass
class EpisodeEngine:
    """Samples for one episode, by its seeds and limits. May be called from another event loop than the episode's; what is
    asked through it by another of the executor's episodes is sampled for that one. `asked` = calls without an answer yet.
    """

    ctx: RolloutContext
    home: asyncio.AbstractEventLoop
    episodes: Episodes
    calls: list[Call] = field(default_factory=list)
    asked: int = 0
    cut_prompts: int = 0

    def budget(self, length: int) -> int:
        """Tokens that may follow a context of `length` tokens; 0 once the episode has had its turns."""
        over = len(self.calls) >= self.ctx.limits.max_turns or self._placeholder
        return 0 if over else max(0, self.ctx.budget(length))

    def continued(self, prompt: Sequence[int]) -> int:
        """How many tokens of the context after the last call a prompt begins with: all of them, else 0."""
        if not self.calls:
            return 0
        last = self.calls[-1]
        context = [*last.prompt, *last.generation.token_ids]
        return len(context) if list(prompt[: len(context)]) == context else 0

    @property
    def _placeholder(self) -> bool:
        return bool(self.calls) and self.calls[-1].generation.finish_reason == "placeholder"

    def encode(self, text: str, images: Sequence[Any] = (), *, most: int | None = None) -> list[int]:
        """The ids of a text as it is, image placeholders expanded. Of a longer text the last `most` are kept, counted; one
        with images that is longer is an error.
        """
        ids, _ = self.ctx.renderer.literal(text, [Image(image) for image in images])
        if most is None or len(ids) <= most:
            return list(ids)
        if images or most < 1:
            raise AgentError(f"a prompt of {len(ids)} tokens does not fit into {most}, rollout.max_len less one reply")
        self.cut_prompts += 1
        return list(ids[-most:])

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Any = None,
        images: Sequence[Any] = (),
        multi_modal_data: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> RequestOutput:
        """vLLM's answer to token ids, image placeholders expanded."""
        shown = (multi_modal_data or {}).get("image", images)
        pictures = tuple(Image(i) for i in (shown if isinstance(shown, list | tuple) else [shown]))
        prompt = tuple(map(int, prompt_token_ids))
        with self.episodes.asking(prompt) as owner:
            options = owner._options(sampling_params)
            return await owner._at_home(owner._generate(prompt, pictures, options))

    async def _at_home(self, work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
        if asyncio.get_running_loop() is self.home:
            return await work
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self.home)
        except RuntimeError:  # that loop is closed: the episode has been given up
            work.close()
            raise
        return await asyncio.wrap_future(answer)

    async def _generate(
        self, prompt: tuple[int, ...], images: tuple[Image, ...], options: dict[str, Any]
    ) -> RequestOutput:
        for image in images:
            self.ctx.keep_images([image])
        generation = await self.ctx.generate(prompt, images=images, **options)
        self.calls.append(Call(prompt, images, generation))
        ids = list(generation.token_ids)
        logprobs = [{i: Logprob(p)} for i, p in zip(ids, generation.logprobs, strict=True)]
        text = self.ctx.renderer.text(ids, special=True)
        return RequestOutput(list(prompt), [CompletionOutput(ids, text, logprobs, generation.finish_reason)])

    def _options(self, params: Any) -> dict[str, Any]:
        """max_new_tokens and stop. Raises AgentError for what would train on another distribution than was sampled."""
        if params is None:
            return {}
        temperature = getattr(params, "temperature", self.ctx.sampling.temperature)
        changed = [name for name, neutral in NEUTRAL.items() if not _is(getattr(params, name, None), neutral)]
        if self.ctx.training and (changed or temperature != self.ctx.sampling.temperature):
            what = changed[0] if changed else "temperature"
            raise AgentError(f"sampling_params.{what} changes the distribution that is sampled, which training refuses")
        stop = getattr(params, "stop", None)
        stop = (stop,) if isinstance(stop, str) else tuple(stop) if stop else None
        return {"max_new_tokens": getattr(params, "max_tokens", None), "stop": stop}


def _is(value: Any, neutral: Any) -> bool:
    return value is None or value == neutral or (isinstance(neutral, tuple) and value in neutral)
