"""An engine without a model: random tokens, true log-probabilities. What an environment does with nonsense is seen in seconds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine import Generation, GenerationRequest, Health, PauseMode, Span
from ..messages import ToolCall
from ..renderer import Renderer
from ..seeds import derive
from .hermes import parse_hermes

END_PROBABILITY = 0.1


class RandomEngine:
    """Each token is a stop id with probability `end_probability`, else uniform over `vocabulary`; stop ids are uniform too.

    That is its distribution at every temperature; `top_p`, stop strings and images change nothing. A sample depends on
    `seed` and the request's sampling seed alone, without one on how many came before. Raises ValueError without tokens.
    """

    def __init__(
        self,
        vocabulary: Sequence[int],
        stop_ids: Sequence[int],
        *,
        seed: int = 0,
        end_probability: float = END_PROBABILITY,
        version: int = 0,
    ) -> None:
        self.version = version
        self._stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self._vocabulary = np.array(sorted(set(vocabulary) - set(stop_ids)), dtype=np.int64)
        if not len(self._stop_ids) or not len(self._vocabulary):
            raise ValueError("a random engine needs ordinary tokens and at least one stop id")
        self._end = end_probability
        self._seed = seed
        self._served = 0
        self._admitting = asyncio.Event()
        self._admitting.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._admitting.wait()
        sampling = request.sampling
        self._served += 1
        base = ("turn", self._served) if sampling.seed is None else ("seed", sampling.seed)
        random = np.random.default_rng(derive(self._seed, *base))
        length = int(random.geometric(self._end))
        stopped = length <= sampling.max_new_tokens
        ordinary = random.choice(self._vocabulary, length - 1 if stopped else sampling.max_new_tokens)
        ids = [*ordinary.tolist(), *(random.choice(self._stop_ids, 1).tolist() if stopped else [])]
        return Generation(
            tuple(ids),
            tuple(self._logprobs(len(ordinary), stopped)),
            (Span(self.version, 0, len(ids)),),
            "stop" if stopped else "length",
        )

    def _logprobs(self, ordinary: int, stopped: bool) -> list[float]:
        each = math.log1p(-self._end) - math.log(len(self._vocabulary))
        stop = math.log(self._end) - math.log(len(self._stop_ids))
        return [each] * ordinary + [stop] * stopped

    async def parse(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        return parse_hermes(text)

    async def pause(self, mode: PauseMode) -> None:
        """Every sample is ready at once, so nothing is under way in any mode."""
        self._admitting.clear()

    async def resume(self) -> None:
        self._admitting.set()

    async def update_weights(self, source: Any, version: int) -> None:
        self.version = version

    async def health(self) -> Health:
        return Health(ok=True, version=self.version)


def ordinary_ids(renderer: Renderer) -> list[int]:
    """The ids of a tokenizer that are text: no special tokens, image placeholders or stop ids."""
    tokenizer = renderer.tokenizer
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    excluded = special | set(tokenizer.all_special_ids) | set(renderer.placeholder_ids) | set(renderer.stop_ids)
    return sorted(set(tokenizer.get_vocab().values()) - excluded)
