from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl.trainers import scorer as scorer_module
from agentrl.trainers.models import Head, Policy, load_policy, unpacked
from agentrl.trainers.packing import pack, split_packs
from agentrl.trainers.pixels import PixelCache, load_pictures
from agentrl.trainers.scorer import TokenScorer
from PIL import Image as PILImage
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl import ConfigError, DataError, Image, Row
from agentrl.image_store import ImageStore

from .rollouts import make_row


def reference(policy: Policy, row: Row, temperature: float, **pixels: Any) -> torch.Tensor:
    """Log-probs of the trained tokens by one plain forward pass of the whole model."""
    ids = torch.from_numpy(row.token_ids).long()
    logits = policy.model(input_ids=ids[None], **pixels).logits[0].float() / temperature
    logp = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return logp[torch.from_numpy(row.loss_mask[1:])]


def alone(scorer: TokenScorer, policy: Policy, rows: list[Row], pictures: PixelCache | None = None) -> torch.Tensor:
    return torch.cat([scorer([pack([row], policy, pictures)])[0] for row in rows])


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_packed_text_equals_one_by_one_and_the_plain_model(models: Path, name: str) -> None:
    policy = load_policy(str(models / name))
    rows = [make_row(seed, length) for seed, length in enumerate([20, 33, 7, 2])]
    scorer = TokenScorer(policy, 0.7)
    together, _ = scorer(split_packs(rows, policy, None))
    assert policy.packs
    assert torch.allclose(together, alone(scorer, policy, rows), atol=1e-5)
    assert torch.allclose(together, torch.cat([reference(policy, row, 0.7) for row in rows]), atol=1e-5)


def test_a_token_that_nothing_predicts_is_refused(models: Path) -> None:
    with pytest.raises(DataError, match="first token"):
        pack([make_row(0, 5, trained=5)], load_policy(str(models / "tied")), None)


def test_chunks_change_neither_values_nor_gradients(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(str(models / "tied"))
    rows = [make_row(seed, 30) for seed in range(3)]
    results = []
    for chunk in (scorer_module.CHUNK_LOGITS, 7 * 320):
        monkeypatch.setattr(scorer_module, "CHUNK_LOGITS", chunk)
        logp, entropy = TokenScorer(policy, 1.3, entropy_grad=True)(split_packs(rows, policy, None))
        (logp.sum() + entropy.sum()).backward()
        results.append((logp.detach(), entropy.detach(), policy.model.model.embed_tokens.weight.grad.clone()))
        policy.model.zero_grad()
    for whole, cut in zip(*results, strict=True):
        assert torch.allclose(whole, cut, atol=1e-4, rtol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements that any floating-point result of an operator had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_is_ever_as_large_as_all_logits(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "CHUNK_LOGITS", 32 * 320)
    policy = load_policy(str(models / "tied"))
    rows = [make_row(seed, 100, trained=99) for seed in range(3)]
    with Largest() as largest:
        logp, entropy = TokenScorer(policy, 1.0, entropy_grad=True)(split_packs(rows, policy, None))
        (logp.sum() + entropy.sum()).backward()
    assert len(logp) == 297
    assert largest.numel < 297 * 320 / 2


@pytest.mark.parametrize("known", [True, False])
def test_without_packs_too_the_logits_of_many_rows_are_not_kept_for_the_backward_pass(
    models: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Rows that fill less than a chunk each, more than one together; of an unknown head the model's own logits are kept."""
    monkeypatch.setattr(scorer_module, "CHUNK_LOGITS", 64 * 320)
    policy = unpacked(load_policy(str(models / "untied")))
    policy = policy if known else replace(policy, head=None)
    packs = split_packs([make_row(seed, 60, trained=59) for seed in range(4)], policy, None)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (59, 320):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logp, _ = TokenScorer(policy, 1.0)(packs)
    assert len(packs) == 4 and len(logp) == 236
    assert sum(kept.values()) == (0 if known else 236 * 320)


def picture(seed: int, width: int, height: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    return Image(PILImage.fromarray(pixels))


class Gallery:
    """Pictures in a store, and how many tokens each is to the vision model."""

    def __init__(self, models: Path, folder: Path) -> None:
        self.policy = load_policy(str(models / "vision"))
        self.store = ImageStore(folder)
        self.cache = load_pictures(str(models / "vision"), self.store)
        self.processor = self.cache._processor.image_processor

    def put(self, seed: int, width: int, height: int) -> tuple[str, int]:
        sha = self.store.put(picture(seed, width, height))
        grid = self.processor(images=[self.store.get(sha).pil], return_tensors="pt")["image_grid_thw"]
        return sha, int(grid.prod())

    def row(self, seed: int, *pictures: tuple[str, int], gap: int = 6) -> Row:
        """Text, picture, sampled text, picture, sampled text, …: one turn a picture."""
        slots, place = [], gap
        for sha, count in pictures:
            slots.append((sha, place, count))
            place += count + gap
        assert self.policy.image_id is not None
        return make_row(seed, place, trained=place - gap, images=tuple(slots), placeholder=self.policy.image_id)


@pytest.fixture
def gallery(models: Path, tmp_path: Path) -> Gallery:
    return Gallery(models, tmp_path)


def test_packed_images_equal_one_by_one_and_the_plain_model(gallery: Gallery) -> None:
    wide, tall = gallery.put(0, 14 * 8, 14 * 2), gallery.put(1, 14 * 3, 14 * 5)
    rows = [gallery.row(2, wide, tall), make_row(3, 11), gallery.row(4, tall), gallery.row(5, tall, wide, wide)]
    policy, scorer = gallery.policy, TokenScorer(gallery.policy, 1.0)
    together, _ = scorer(split_packs(rows, policy, gallery.cache))
    assert policy.packs
    assert torch.allclose(together, alone(scorer, policy, rows, gallery.cache), atol=1e-5)
    plain = []
    for row in rows:
        kinds = torch.from_numpy(row.token_ids == policy.image_id).int()[None]
        shown = [gallery.store.get(sha).pil for sha, _, _ in row.images]
        pixels = dict(gallery.processor(images=shown, return_tensors="pt")) if shown else {}
        plain.append(reference(policy, row, 1.0, mm_token_type_ids=kinds, **pixels))
    assert torch.allclose(together, torch.cat(plain), atol=1e-5)


def test_a_sampled_placeholder_is_a_target_but_claims_no_picture(gallery: Gallery) -> None:
    row = gallery.row(2, gallery.put(0, 56, 56))
    row.token_ids[-2] = gallery.policy.image_id
    packed = pack([row], gallery.policy, gallery.cache)
    assert packed.labels[-2] == gallery.policy.image_id
    assert packed.ids[-2] == gallery.policy.stand_in not in gallery.policy.placeholders
    logp, _ = TokenScorer(gallery.policy, 1.0)([packed])
    assert bool(logp.isfinite().all())


def test_a_wrong_number_of_placeholders_is_an_error(gallery: Gallery) -> None:
    sha, count = gallery.put(0, 56, 56)
    with pytest.raises(DataError, match=f"{count - 1} placeholders in a row, but is {count} tokens"):
        pack([gallery.row(1, (sha, count - 1))], gallery.policy, gallery.cache)


def test_the_least_recently_used_pictures_leave_the_cache(gallery: Gallery) -> None:
    shown = [gallery.put(seed, 56, 56) for seed in range(3)]
    one = gallery.cache.get(*shown[0])
    small = PixelCache(
        gallery.store, gallery.cache._processor, max_bytes=2 * sum(tensor.nbytes for tensor in one.values())
    )
    for index in (0, 1, 0, 2):
        small.get(*shown[index])
    assert list(small._kept) == [shown[0][0], shown[2][0]]


SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def other_model(folder: Path, name: str, sharpness: float = 3.0, recompute: bool = False, **options: Any) -> Policy:
    import transformers

    torch.manual_seed(0)
    kind = {"Llama4": "Llama4Text"}.get(name, name)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **HEADS, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpness if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return load_policy(str(folder), gradient_checkpointing=recompute)


@pytest.mark.parametrize(
    ("name", "options", "packs", "head"),
    [
        ("Llama", {}, True, Head()),
        ("Mistral", {"sliding_window": 8}, True, Head()),
        ("Gemma2", {"sliding_window": 8, "final_logit_softcapping": 2.0}, False, Head(cap=2.0)),
        ("Granite", {"logits_scaling": 4.0}, True, Head(scale=0.25)),
        ("Cohere", {"logit_scale": 0.5}, True, Head(scale=0.5)),
    ],
)
def test_other_families(tmp_path: Path, name: str, options: dict[str, Any], packs: bool, head: Head) -> None:
    policy = other_model(tmp_path, name, **options)
    rows = [make_row(seed, length) for seed, length in enumerate([20, 33, 7])]
    logp, _ = TokenScorer(policy, 0.9)(split_packs(rows, policy, None))
    assert (policy.packs, policy.head) == (packs, head)
    unknown = replace(policy, head=None)
    assert torch.allclose(logp, TokenScorer(unknown, 0.9)(split_packs(rows, unknown, None))[0], atol=1e-5)
    assert torch.allclose(logp, torch.cat([reference(policy, row, 0.9) for row in rows]), atol=1e-5)


def test_what_is_found_out_about_models_that_are_not_as_they_seem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that drop what they like when they are in training, a window that the layers keep to themselves and that no
    short sequence would show, a cap that small logits do not show, a model that is its own trunk.
    """
    rows = [make_row(seed, length) for seed, length in enumerate([20, 33, 7])]
    for name, options, packs in (
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "recompute": True}, True),
        ("Phimoe", {"sliding_window": 25, "num_local_experts": 2}, False),
        ("Mistral", {"sliding_window": 25, "recompute": True}, True),
    ):
        caplog.clear()
        policy = other_model(tmp_path / name, name, **options)
        logp, _ = TokenScorer(policy, 0.9)(split_packs(rows, policy, None))
        logp.sum().backward()
        assert policy.packs == packs == ("cannot share a pack" not in caplog.text)
        with torch.no_grad():
            assert torch.allclose(logp, torch.cat([reference(policy, row, 0.9) for row in rows]), atol=1e-5)
    fresh = other_model(tmp_path / "Gemma2", "Gemma2", sharpness=1.0)
    assert fresh.head == Head(cap=30.0) and "soft caps" in caplog.text
    with pytest.raises(ConfigError, match="llama4_text have no part that gives hidden states"):
        other_model(tmp_path / "Llama4", "Llama4")
