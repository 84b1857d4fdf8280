"""Real vLLM and Hugging Face on what supervised training with LoRA wrote: the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Renderer
from agentrl.config import SftConfig
from agentrl.engine import GenerationRequest, Sampling
from agentrl.engines.vllm_actor import RayEngine
from agentrl.supervised.examples import Item, as_row
from agentrl.supervised.spelling import Speller

from . import tiny

pytestmark = pytest.mark.slow
TURNS = {"red": "rouge et noir", "blue": "bleu comme la mer", "green": "vert de gris"}
TOKENS = 16


def asked(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return whole[0, len(prompt) :].tolist()


@pytest.fixture
def final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a short run wrote at its end; the model it began with is beside it, in `model`."""
    from agentrl.trainers.supervised_trainer import SupervisedTrainer

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    tiny.text_model(tmp_path / "model", tied=True)
    speller = Speller(Renderer(tiny.tokenizer()))
    chats = [[asked(question), {"role": "assistant", "content": answer}] for question, answer in TURNS.items()]
    items: list[Item] = [as_row(speller.spell(chat), chat[0]["content"], None) for chat in chats]
    config = SftConfig.model_validate({"lora": {"rank": 8}, "optim": {"name": "adamw", "lr": 3e-2, "warmup": 0}})
    trainer = SupervisedTrainer(config, str(tmp_path / "model"), str(tmp_path / "images"), 20, 1e-3)
    for step in range(1, 21):
        trainer.train(items, step)
    trainer.export(tmp_path / "final")
    return tmp_path / "final"


@pytest.fixture
def engine(final: Path, launch: Callable[..., RayEngine]) -> RayEngine:
    return launch(final, stop_token_ids=(tiny.token_id("<|im_end|>"),))


async def test_the_final_folder_says_the_same_in_both(final: Path, engine: RayEngine) -> None:
    from transformers import AutoModelForCausalLM

    renderer = Renderer(tiny.tokenizer())
    folders = (final, final.parent / "model")
    trained, before = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    moved = 0
    for question in (*TURNS, "a question that was never asked"):
        prompt = renderer.start([asked(question)]).token_ids
        generation = await engine.generate(GenerationRequest(prompt, Sampling(max_new_tokens=TOKENS, temperature=0.0)))
        assert list(generation.token_ids) == greedy(trained, prompt)
        moved += greedy(before, prompt) != greedy(trained, prompt)
    assert moved >= len(TURNS)
