"""A weight update: how long requests see a pause, and how it compares with a plain copy of the same bytes.

    python benchmarks/weights.py [--hidden 576 --layers 30] [--updates 5]

A real vLLM engine on this machine with a random Llama (134 M parameters unless told otherwise) in float32, eight requests
running all the time. Writes benchmarks/results/weights.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "weights.json"
RUNNING, TOKENS = 8, 64


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A random Llama whose vocabulary is small, so that the layers count."""
    import torch
    from agentrl.trainers.tiny import make_tiny
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny("tiny-text", folder, max_steps=0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


async def measure(folder: Path, updates: int) -> dict[str, Any]:
    """Means over the updates; `pause_s` is the longest time between admission and going on that the door was shut."""
    from transformers import AutoModelForCausalLM

    from agentrl import GenerationRequest, Sampling
    from agentrl.engines.vllm_actor import start_engine
    from agentrl.engines.vllm_options import VLLMOptions
    from agentrl.engines.weights import WeightPublisher

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tensors = dict(model.state_dict())
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    copy_s = _copy_seconds(tensors)
    engine = await start_engine(VLLMOptions(str(folder), max_model_len=512, max_num_seqs=RUNNING))
    running = [
        asyncio.create_task(_keep_asking(engine, GenerationRequest, Sampling, index)) for index in range(RUNNING)
    ]
    laps: dict[str, list[float]] = {"write": [], "pause": [], "load": [], "shut": []}
    try:
        await asyncio.sleep(5)
        with WeightPublisher() as publisher:
            for version in range(1, updates + 1):
                began = time.monotonic()
                source = publisher.publish(tensors.items(), version)
                written = time.monotonic()
                await engine.pause("keep")
                paused = time.monotonic()
                await engine.update_weights(source, version)
                loaded = time.monotonic()
                await engine.resume()
                ended = time.monotonic()
                for name, lap in zip(
                    laps, (written - began, paused - written, loaded - paused, ended - written), strict=True
                ):
                    laps[name].append(lap)
                await asyncio.sleep(2)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await engine.close()
    means = {f"{name}_s": statistics.mean(values) for name, values in laps.items()}
    through = means["write_s"] + means["load_s"]
    return {
        "bytes": nbytes,
        "updates": updates,
        **means,
        "copy_s": copy_s,
        "update_bytes_per_s": nbytes / through,
        "copy_bytes_per_s": nbytes / copy_s,
        "times_a_copy": through / copy_s,
    }


def _copy_seconds(tensors: dict[str, Any]) -> float:
    """The best of three copies of all tensors into memory that is there already."""
    targets = [tensor.clone() for tensor in tensors.values()]
    best = float("inf")
    for _ in range(3):
        began = time.monotonic()
        for target, tensor in zip(targets, tensors.values(), strict=True):
            target.copy_(tensor)
        best = min(best, time.monotonic() - began)
    return best


async def _keep_asking(engine: Any, request: Any, sampling: Any, index: int) -> None:
    turn = 0
    while True:
        turn += 1
        await engine.generate(
            request(tuple(range(5, 25)), sampling(max_new_tokens=TOKENS, seed=turn), (), f"{index}-{turn}")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    import ray

    from agentrl.torchvision_ops import ensure_torchvision_imports

    ensure_torchvision_imports()
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", options.hidden, options.layers)
        found = asyncio.run(measure(Path(folder) / "model", options.updates))
    ray.shutdown()
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
