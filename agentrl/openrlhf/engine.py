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
OFF = ("frequency_penalty", "min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "structured_outputs")
"""Of NEUTRAL the values, and what must be 0 or empty: they leave the distribution as it is. Training refuses anything else."""


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
    """One sample. `text` has special tokens and the stop string where the sampling parameters keep them."""

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

    @property
    def length(self) -> int:
        """Of the context after it, in tokens."""
        return len(self.prompt) + len(self.generation.token_ids)

    def goes_on_in(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with the context after it. The sample is compared first, as most contexts begin alike."""
        start = len(self.prompt)
        sampled = tuple(prompt[start : self.length]) == tuple(self.generation.token_ids)
        return sampled and tuple(prompt[:start]) == self.prompt


@dataclass
class EpisodeEngine:
    """Samples for one episode, by its seeds and limits. May be called from another event loop than the episode's; what is
    asked through it by another of the executor's episodes is sampled for that one. `asked` = calls without an answer yet,
    `trained` = those that the episode is made of.
    """

    ctx: RolloutContext
    home: asyncio.AbstractEventLoop
    episodes: Episodes
    calls: list[Call] = field(default_factory=list)
    trained: list[Call] = field(default_factory=list)
    asked: int = 0
    cut_prompts: int = 0

    def budget(self, length: int) -> int:
        """Tokens that may follow a context of `length` tokens; 0 once the episode has had its turns."""
        over = len(self.calls) >= self.ctx.limits.max_turns or self._placeholder
        return 0 if over else max(0, self.ctx.budget(length))

    def continued(self, prompt: Sequence[int]) -> int:
        """How many tokens the longest context after a call has with which a prompt begins; 0 where there is none."""
        return max((call.length for call in self.calls if call.goes_on_in(prompt)), default=0)

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
            owner._check(sampling_params)
            return await owner._at_home(owner._generate(prompt, pictures, sampling_params))

    async def _at_home(self, work: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
        if asyncio.get_running_loop() is self.home:
            return await work
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self.home)
        except RuntimeError:  # that loop is closed: the episode has been given up
            work.close()
            raise
        return await asyncio.wrap_future(answer)

    async def _generate(self, prompt: tuple[int, ...], images: tuple[Image, ...], params: Any) -> RequestOutput:
        for image in images:
            self.ctx.keep_images([image])
        stops = _stops(params)
        generation = await self.ctx.generate(
            prompt, images=images, max_new_tokens=getattr(params, "max_tokens", None), stop=stops or None
        )
        self.calls.append(Call(prompt, images, generation))
        ids = list(generation.token_ids)
        logprobs = [{i: Logprob(p)} for i, p in zip(ids, generation.logprobs, strict=True)]
        output = CompletionOutput(ids, self._text(ids, stops, params), logprobs, generation.finish_reason)
        return RequestOutput(list(prompt), [output])

    def _text(self, ids: list[int], stops: Sequence[str], params: Any) -> str:
        """What vLLM calls the text of a sample: it ends with the stop string or token, or before it, and has special tokens or
        none, as `params` say; by default it has both.
        """
        to_the_stop = getattr(params, "include_stop_str_in_output", True)
        special = not getattr(params, "skip_special_tokens", False)
        renderer = self.ctx.renderer
        ends = bool(ids) and ids[-1] in renderer.stop_ids
        text = renderer.text(ids[:-1] if ends and not to_the_stop else ids, special=special)
        for stop in stops:
            before, found, _ = text.partition(stop)
            text = before + found if to_the_stop else before
        return text

    def _check(self, params: Any) -> None:
        """Raises AgentError for what would train on another distribution than was sampled, and for several samples at once."""
        if getattr(params, "n", 1) not in (None, 1):
            raise AgentError(f"sampling_params.n {params.n}: a call gives one sample; call as often as there are to be")
        if params is None or not self.ctx.training:
            return
        temperature = getattr(params, "temperature", self.ctx.sampling.temperature)
        changed = [name for name, neutral in NEUTRAL.items() if not _is(getattr(params, name, None), neutral)]
        changed += [name for name in OFF if getattr(params, name, None)]
        changed += ["temperature"] if temperature != self.ctx.sampling.temperature else []
        if changed:
            raise AgentError(
                f"sampling_params.{changed[0]} changes the distribution that is sampled, which training refuses"
            )


def _stops(params: Any) -> tuple[str, ...]:
    stop = getattr(params, "stop", None)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _is(value: Any, neutral: Any) -> bool:
    return value is None or value == neutral or (isinstance(neutral, tuple) and value in neutral)
