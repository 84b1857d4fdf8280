"""What the engine must agree with: Hugging Face in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from agentrl.engine import Generation, Health
from agentrl.engines.vllm_actor import RayEngine
from agentrl.engines.weights import WeightPublisher


@torch.no_grad()
def hf_logprobs(
    model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0, **inputs: torch.Tensor
) -> torch.Tensor:
    """Log-softmax(logits / temperature) of the sampled ids after the prompt, shape [len(sampled)]."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def kept_logprobs(old: Any, new: Any, prompt: Sequence[int], sampled: Sequence[int], cut: int) -> torch.Tensor:
    """Those of the ids sampled from `cut` on, by new weights over the KV cache that the old ones left. The KV of the last
    id of before is computed with the first step after.
    """
    ids = torch.tensor([[*prompt, *sampled]])
    known = len(prompt) + cut - 1
    cache = old(input_ids=ids[:, :known], use_cache=True).past_key_values
    logits = new(input_ids=ids[:, known:-1], past_key_values=cache, use_cache=True).logits[0].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, known + 1 :, None])[:, 0]


def worst(generation: Generation, expected: torch.Tensor, start: int = 0, end: int | None = None) -> float:
    """The largest difference between the engine's log-probs and the expected ones over [start, end)."""
    got = torch.tensor(generation.logprobs)
    return float((got - expected)[start:end].abs().max())


@torch.no_grad()
def disturb(model: Any, seed: int, scale: float = 0.2) -> None:
    """Add noise of `scale` times its own spread to every matrix."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * scale)


async def until_running(engine: RayEngine, count: int, timeout_s: float = 20.0) -> None:
    """Wait until the engine reports at least `count` running requests (0: until it reports none)."""
    async with asyncio.timeout(timeout_s):
        while True:
            running = (await engine.health()).running
            if running >= count > 0 or running == count == 0:
                return
            await asyncio.sleep(0.01)


async def until_unhealthy(engine: RayEngine, timeout_s: float = 60.0) -> Health:
    """Wait until the engine says that something is wrong."""
    async with asyncio.timeout(timeout_s):
        while True:
            health = await engine.health()
            if not health.ok:
                return health
            await asyncio.sleep(0.2)


async def update(engine: RayEngine, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Publish, pause with requests kept, load, resume."""
    with WeightPublisher() as publisher:
        source = publisher.publish(tensors, version)
        await engine.pause("keep")
        try:
            await engine.update_weights(source, version)
        finally:
            await engine.resume()
