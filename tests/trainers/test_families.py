"""Vision-language models beside Qwen2.5-VL: several pictures over several turns, packed or row by row, frozen or trained."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import picture_check
from agentrl.trainers.models import load_policy
from agentrl.trainers.packing import split_packs
from agentrl.trainers.picture_check import check_pictures
from agentrl.trainers.pixels import PixelCache, load_pictures
from agentrl.trainers.scorer import TokenScorer
from PIL import Image as PILImage
from safetensors.torch import load_file

from agentrl import ConfigError, Image, Row
from agentrl.image_store import ImageStore

from . import families
from .rollouts import distance, make_row, published, weights

Make = Callable[..., Any]
FAMILIES = tuple(families.FAMILIES)


@pytest.fixture(scope="session")
def zoo(models: Path) -> Path:
    """The tests' models, with one folder for each family more."""
    for kind in FAMILIES:
        families.save(kind, models / kind)
    return models


def picture(seed: int, width: int, height: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    return Image(PILImage.fromarray(pixels))


def make_seen_row(seed: int, shown: list[Image], store: ImageStore, cache: PixelCache, **about: Any) -> Row:
    """Text, picture, sampled text, picture, …: one turn a picture, all but pictures and the first words trained."""
    ids, slots = list(range(10, 16)), []
    for turn, image in enumerate(shown):
        slots.append((store.put(image), len(ids), len(cache.run(image))))
        ids += [*cache.run(image), *range(20 + seed + turn, 26 + seed + turn)]
    row = make_row(seed, len(ids), trained=1, **about)
    row.token_ids[:], row.images = ids, slots
    row.loss_mask[6:] = True
    for _, start, count in slots:
        row.loss_mask[start : start + count] = False
    row.logprobs[row.loss_mask], row.versions[row.loss_mask] = -5.5, 0
    return row


def mixed_rows(store: ImageStore, cache: PixelCache) -> list[Row]:
    one, two, three = picture(0, 56, 56), picture(1, 112, 56), picture(2, 56, 140)
    return [
        make_seen_row(1, [one, two], store, cache, reward=1.0),
        make_row(2, 13, reward=0.0),
        make_seen_row(3, [three], store, cache, reward=0.0),
        make_seen_row(4, [two, one, three], store, cache, reward=1.0),
    ]


@torch.no_grad()
def plain_logp(folder: Path, row: Row, store: ImageStore, cache: PixelCache) -> torch.Tensor:
    """By the family's own code, on one row."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(row.token_ids).long()[None]
    inputs: dict[str, Any] = {}
    if row.images:
        inputs = dict(
            cache._processor.image_processor(
                images=[store.get(sha).pil for sha, _, _ in row.images], return_tensors="pt"
            )
        )
    if hasattr(model.model, "get_rope_index"):
        inputs["mm_token_type_ids"] = (ids == families.IMAGE).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    logp = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return logp[torch.from_numpy(row.loss_mask[1:])]


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_pictures_equal_the_familys_own_code(zoo: Path, tmp_path: Path, kind: str) -> None:
    store = ImageStore(tmp_path)
    cache = load_pictures(str(zoo / kind), store)
    policy = check_pictures(load_policy(str(zoo / kind)), cache)
    assert policy.packs == (kind != "llava_gemma2")
    rows = mixed_rows(store, cache)
    packs = split_packs(rows, policy, cache)
    assert len(packs) == (1 if policy.packs else len(rows))
    with torch.no_grad():
        together, _ = TokenScorer(policy, 1.0)(packs)
    alone = torch.cat([plain_logp(zoo / kind, row, store, cache) for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_vision_half_is_trained_or_frozen_whatever_the_cut(
    make_trainer: Make, zoo: Path, tmp_path: Path, kind: str, frozen: bool
) -> None:
    store = ImageStore(tmp_path / "images")
    runs = []
    for budget in (100_000, 110):
        trainer = make_trainer(
            kind, model={"freeze_vision": frozen}, optim={"lr": 0.01}, train={"micro_batch_tokens": budget}
        )
        before = weights(trainer)
        trainer.train(mixed_rows(store, trainer._tools.reader.pictures), 0)
        runs.append(weights(trainer))
    moved = {name for name, tensor in runs[0].items() if not torch.equal(tensor, before[name])}
    seeing = {name for name in moved if ".language_model." not in name and "lm_head" not in name}
    assert moved - seeing and bool(seeing) != frozen
    assert distance(*runs) < 1e-6
    sent, stored = published(trainer), load_file(zoo / kind / "model.safetensors")
    assert {name: tensor.shape for name, tensor in sent.items()} == {name: t.shape for name, t in stored.items()}


def test_adapters_stay_out_of_a_frozen_vision_half(make_trainer: Make, zoo: Path) -> None:
    adapted = []
    for frozen in (False, True):
        trainer = make_trainer("llava", model={"freeze_vision": frozen}, lora={"rank": 2})
        trained = [name for name, p in trainer.policy.model.named_parameters() if p.requires_grad]
        adapted.append({name.split(".")[1] for name in trained})
    assert adapted == [{"vision_tower", "multi_modal_projector", "language_model"}, {"language_model"}]


def test_a_text_model_has_no_vision_half_to_freeze(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model\.freeze-vision.*text model"):
        load_policy(str(models / "tied"), freeze_vision=True)


@pytest.mark.parametrize("agreeing", [[False, True], [False, False]])
def test_pictures_that_do_not_pack_are_computed_one_by_one_or_refused(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, agreeing: list[bool]
) -> None:
    answers = itertools.chain(agreeing)
    monkeypatch.setattr(picture_check, "agree", lambda *_: next(answers))
    cache = load_pictures(str(zoo / "llava"), ImageStore(tmp_path))
    policy = load_policy(str(zoo / "llava"))
    with caplog.at_level(logging.WARNING):
        if agreeing[-1]:
            assert not check_pictures(policy, cache).packs
            assert policy.model.config.text_config._attn_implementation == policy.own_attention
        else:
            with pytest.raises(ConfigError, match="Pictures of a llava model cannot be trained on"):
                check_pictures(policy, cache)
    assert "cannot share a pack" in caplog.text
