"""Two ranks of ZeRO stage 3 that gather layers as they pass through them: however many chunks of logits, or rows that share no
pack, each of them has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers import scorer
from agentrl.trainers.backend import Place
from agentrl.trainers.policy_trainer import PolicyTrainer
from agentrl.trainers.reading import open_model
from torch.distributed import TCPStore

from agentrl import ConfigError
from agentrl.config import Config
from agentrl.engines.weights import WeightReader
from agentrl.torchvision_ops import ensure_torchvision_imports

from .rollouts import distance, make_rows, published

ensure_torchvision_imports()
VOCABULARY = 4096
"""With 64 wide states the output head is one of the layers that DeepSpeed shards: it has more than 100,000 weights."""
CHUNK_LOGITS = 4 * VOCABULARY
ATTENTIONS = ("auto", "sdpa")
"""Packed, and row by row."""
TIMEOUT_S = 100
BATCHES = make_rows(1, 5), make_rows(2, 3)


def configured(attention: str, ranks: int, stage: int, freeze_vision: bool = False) -> Config:
    return Config.model_validate(
        {
            "optim": {"name": "sgd", "lr": 0.1, "max_norm": 0.0},
            "train": {"max_staleness": 0, "micro_batch_tokens": 60},
            "algo": {"name": "ppo", "entropy_coef": 0.1, "old_logp": "recompute"},
            "model": {"attention": attention, "freeze_vision": freeze_vision},
            "parallel": {"ranks": ranks, "zero_stage": stage},
        }
    )


def make_model(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **shape)).save_pretrained(folder)
    return str(folder)


def rank_of_two(rank: int, port: int, path: str, out: Path) -> None:
    scorer.CHUNK_LOGITS = CHUNK_LOGITS
    for attention in ATTENTIONS:
        place = Place(rank, 2, ("127.0.0.1", port))
        trainer = PolicyTrainer(configured(attention, 2, 3), path, str(out / "images"), 10, 1e-3, place)
        metrics = [trainer.train(rows, step).metrics for step, rows in enumerate(BATCHES)]
        source = trainer.publish(1)
        if source is not None:
            weights = {name: tensor.clone() for name, tensor in WeightReader(source).tensors()}
            torch.save((metrics, weights), out / f"{attention}.pt")
        trainer.release()


@pytest.mark.slow
def test_two_ranks_of_unlike_shares_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = make_model(tmp_path / "model")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pair = torch.multiprocessing.spawn(rank_of_two, (store.port, path, tmp_path), nprocs=2, join=False)
    single = PolicyTrainer(configured("auto", 1, 0), path, str(tmp_path / "images"), 10, 1e-3)
    expected: list[Any] = [
        pytest.approx(single.train(rows, step).metrics, abs=2e-5, rel=2e-4) for step, rows in enumerate(BATCHES)
    ]
    try:
        for process in pair.processes:
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in pair.processes] == [0, 0]
    finally:
        for process in pair.processes:
            process.kill()
    for attention in ATTENTIONS:
        metrics, weights = torch.load(tmp_path / f"{attention}.pt", weights_only=True)
        assert metrics == expected
        assert distance(weights, published(single)) < 1e-6


@pytest.mark.parametrize(
    ("stage", "frozen", "refused"), [(3, True, True), (2, False, True), (2, True, False), (1, False, False)]
)
def test_pictures_that_do_not_pack_are_refused_where_ranks_would_mix_up_layers(
    models: Path, tmp_path: Path, stage: int, frozen: bool, refused: bool
) -> None:
    config, path, cpu = configured("sdpa", 2, stage, frozen), str(models / "vision"), torch.device("cpu")
    if refused:
        with pytest.raises(
            ConfigError, match=f"zero-stage {stage} on several ranks: .*vision reads pictures row by row"
        ):
            open_model(config, path, str(tmp_path), trained=True, device=cpu, ranks=2)
    else:
        assert open_model(config, path, str(tmp_path), trained=True, device=cpu, ranks=2).always_look
