"""What `rollout.kv = keep` costs in exactness: sequences go on over the KV cache that older weights left.

    python benchmarks/keep.py [--lr 1e-6 1e-5 1e-4] [--updates 4]

The tiny text policy on a real vLLM engine, 16 requests running all the time; the trainer's weights move by AdamW steps on the
policy gradient of what was just sampled, with random advantages, and each update falls into running sequences. Afterwards every
sampled token's log-probability is computed anew from the weights it is stamped with, over the whole sequence: the engine's and
this one should agree. Once for `keep` and once for `recompute`. Prints, and writes to benchmarks/results/keep.json, the KL (k3
estimate, mean over tokens) and the largest difference: of `clean` tokens (no older version before them in their sequence), of
`spanning` ones (after an update within it), and for comparison how far the same spanning tokens are from the weights of one
version before.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results" / "keep.json"
RUNNING, TOKENS, PROMPT = 16, 256, 12
Kv = Literal["keep", "recompute"]
EVERY = 16
"""Sequences that end between two updates."""


class Sampler:
    """Keeps `RUNNING` requests on the engine; `done` = (prompt, generation) of those that ended."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.done: list[tuple[list[int], Any]] = []
        self.ended = asyncio.Condition()

    async def keep_asking(self, index: int) -> None:
        from agentrl import GenerationRequest, Sampling

        turn = 0
        while True:
            turn += 1
            prompt = np.random.default_rng([index, turn]).integers(5, self.vocabulary // 2, PROMPT).tolist()
            sampling = Sampling(max_new_tokens=TOKENS, seed=1000 * index + turn)
            generation = await self.engine.generate(GenerationRequest(tuple(prompt), sampling, (), f"{index}-{turn}"))
            async with self.ended:
                self.done.append((prompt, generation))
                self.ended.notify_all()

    async def more(self, count: int) -> Sequence[tuple[list[int], Any]]:
        """The next so many that end."""
        known = len(self.done)
        async with self.ended, asyncio.timeout(300):
            await self.ended.wait_for(lambda: len(self.done) >= known + count)
        return self.done[known:]


def logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Any:
    """Of the sampled ids, [len(sampled)]."""
    import torch

    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def step(model: Any, optimizer: Any, sampled: Sequence[tuple[list[int], Any]], seed: int) -> None:
    """One AdamW step on the policy gradient with an advantage of 1 or -1 for each sequence."""
    advantages = np.random.default_rng(seed).choice([-1.0, 1.0], len(sampled))
    optimizer.zero_grad()
    for (prompt, generation), advantage in zip(sampled, advantages, strict=True):
        (-float(advantage) * logprobs(model, prompt, generation.token_ids).mean() / len(sampled)).backward()
    optimizer.step()


async def measure(folder: Path, kv: Kv, rates: Sequence[float], updates: int) -> dict[str, Any]:
    """For each learning rate, what `compare` finds in the sequences of its updates."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.engines.vllm_actor import start_engine
    from agentrl.engines.vllm_options import VLLMOptions
    from agentrl.engines.weights import WeightPublisher

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    start = copy.deepcopy(model.state_dict())
    engine = await start_engine(VLLMOptions(str(folder), max_model_len=512, max_num_seqs=RUNNING, kv=kv))
    found, version = {}, 0
    with WeightPublisher() as publisher:

        async def publish() -> None:
            source = publisher.publish(model.state_dict().items(), version)
            await engine.pause("keep")
            await engine.update_weights(source, version)
            await engine.resume()

        for rate in rates:
            model.load_state_dict(start)
            version += 1
            await publish()
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
            models = {version: copy.deepcopy(model)}
            sampler = Sampler(engine, model.config.vocab_size)
            asking = [asyncio.create_task(sampler.keep_asking(index)) for index in range(RUNNING)]
            try:
                for _ in range(updates):
                    sampled = await sampler.more(EVERY)
                    version += 1
                    await asyncio.to_thread(step, model, optimizer, sampled, version)
                    await publish()
                    models[version] = copy.deepcopy(model)
                await sampler.more(EVERY)
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            found[f"{rate:g}"] = one = compare(models, sampler.done)
            print(kv, f"lr {rate:g}:", json.dumps(one), flush=True)
    await engine.close()
    return found


def compare(models: dict[int, Any], done: Sequence[tuple[list[int], Any]]) -> dict[str, Any]:
    """The engine's log-probabilities against those of the weights that each token is stamped with."""
    import torch

    parts: dict[str, list[Any]] = {"clean": [], "spanning": [], "a version apart": []}
    with torch.no_grad():
        for prompt, generation in done:
            first = generation.version_spans[0].version
            for span in generation.version_spans:
                exact = logprobs(models[span.version], prompt, generation.token_ids)[span.start : span.end].numpy()
                engine = np.array(generation.logprobs[span.start : span.end])
                parts["clean" if span.version == first else "spanning"].append(exact - engine)
                if span.version != first:
                    before = logprobs(models[span.version - 1], prompt, generation.token_ids)
                    parts["a version apart"].append(before[span.start : span.end].numpy() - exact)
    return {name: _summary(np.concatenate(gaps)) for name, gaps in parts.items() if gaps}


def _summary(gap: Any) -> dict[str, float]:
    gap = gap.astype(np.float64)
    return {"tokens": len(gap), "kl": float(np.mean(np.expm1(gap) - gap)), "max_abs": float(np.abs(gap).max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--updates", type=int, default=4, help="of each learning rate")
    options = parser.parse_args()
    import ray

    from agentrl.torchvision_ops import ensure_torchvision_imports

    ensure_torchvision_imports()
    from agentrl.trainers.tiny import cached_tiny

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    folder = cached_tiny("tiny-text")
    found = {kv: asyncio.run(measure(Path(folder), kv, options.lr, options.updates)) for kv in get_args(Kv)}
    ray.shutdown()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
