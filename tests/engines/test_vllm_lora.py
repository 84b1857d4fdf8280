"""Real vLLM and a trainer with LoRA on one model: after updates the engine's log-probs are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.config import Config
from agentrl.engine import GenerationRequest, Sampling
from agentrl.engines.vllm_actor import RayEngine
from agentrl.trajectory import Row

from . import reference, tiny

pytestmark = pytest.mark.slow
PROMPTS = tuple(tuple(range(i, 20 + i)) for i in range(4))


async def sampled(engine: RayEngine, version: int) -> list[Row]:
    """A row for each prompt, with what the engine sampled and its log-probs."""
    rows = []
    for i, prompt in enumerate(PROMPTS):
        generation = await engine.generate(GenerationRequest(prompt, Sampling(max_new_tokens=24, seed=i)))
        assert {span.version for span in generation.version_spans} == {version}
        mask = np.arange(len(prompt) + len(generation.token_ids)) >= len(prompt)
        logprobs = np.zeros(len(mask), np.float32)
        logprobs[mask] = generation.logprobs
        row = Row(
            token_ids=np.array([*prompt, *generation.token_ids], np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            versions=np.where(mask, version, -1).astype(np.int32),
            rewards=np.zeros(len(mask), np.float32),
            rollout_id=f"{i}",
            group_id="g",
            total_reward=float(i % 2),
        )
        rows.append(row)
    return rows


@pytest.fixture
def served(launch: Callable[..., RayEngine], tmp_path: Path) -> RayEngine:
    tiny.text_model(tmp_path, tied=True)
    return launch(tmp_path)


async def test_the_engine_samples_from_the_merged_weights(
    served: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.trainers.policy_trainer import PolicyTrainer
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = Config.model_validate(
        {"lora": {"rank": 4}, "optim": {"name": "adamw", "lr": 5e-2}, "train": {"max_staleness": 0}}
    )
    trainer = PolicyTrainer(config, str(tmp_path), str(tmp_path / "images"), 10, 1e-3)
    for version in (1, 2):
        assert trainer.train(await sampled(served, version - 1), version).metrics["mismatch/max_abs"] < 1e-4
        source = trainer.publish(version)
        await served.pause("keep")
        await served.update_weights(source, version)
        await served.resume()
        trainer.release()
    last = await sampled(served, 2)
    assert trainer.train(last, 3).metrics["mismatch/max_abs"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = last[0].token_ids.tolist()
    moved = reference.hf_logprobs(base, ids[:20], ids[20:]) - torch.from_numpy(last[0].logprobs[20:])
    assert float(moved.abs().max()) > 0.05
