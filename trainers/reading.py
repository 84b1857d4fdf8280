"""Rows through a model: packed the way this model reads them, its outputs cut by row again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import LoraSection, TrainerConfig
from ..errors import ConfigError
from ..image_store import ImageStore
from ..trajectory import Row
from .backend import gather
from .models import TEXT, Policy, load_policy
from .packing import Pack, split_packs
from .picture_check import check_pictures
from .pixels import PixelCache, load_pictures

Module = Callable[..., tuple[Tensor, ...]]
"""Packs in; one or several outputs, each with one value for each trained token of the packs."""


@dataclass(frozen=True)
class Reader:
    """How a model is fed. `pictures` is None for a text model; `always_look` as in `split_packs`; `in_step`: the ranks gather
    the model's layers together as they pass through them (ZeRO stage 3), so each passes as often as every other.
    """

    policy: Policy
    pictures: PixelCache | None
    device: torch.device
    always_look: bool = False
    in_step: bool = False

    def __call__(self, module: Module, rows: Sequence[Row]) -> tuple[list[Tensor], ...]:
        """Each output of the module as one tensor a row, over the row's trained tokens."""
        packs = split_packs(rows, self.policy, self.pictures, always_look=self.always_look)
        packs = _in_step(packs) if self.in_step else packs
        outputs = module([pack.to(self.device) for pack in packs])
        counts = [count for pack in packs for count in pack.counts]
        return tuple(_of_rows(output.split(counts), len(rows)) for output in outputs)

    def with_model(self, model: Any) -> Reader:
        """The same for a part of the model."""
        return replace(self, policy=replace(self.policy, model=model))


def _in_step(packs: Sequence[Pack]) -> list[Pack]:
    """As many packs as the rank with most has, the shortest once more in place of those that are missing; all with the trained
    tokens of the largest at their place.
    """
    spare = min(packs, key=lambda pack: len(pack.ids))
    ranks = gather(([len(pack.labels) for pack in packs], len(spare.labels)))
    count = max(len(own) for own, _ in ranks)
    places = zip(*(own + [more] * (count - len(own)) for own, more in ranks), strict=True)
    filled = [*packs, *[spare] * (count - len(packs))]
    return [replace(pack, most=max(place)) for pack, place in zip(filled, places, strict=True)]


def _of_rows(parts: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Those of the rows. What was computed for the sake of other ranks has no part in them, but one in the backward pass."""
    own, others = list(parts[:rows]), parts[rows:]
    if others:
        own[0] = own[0] + 0.0 * torch.cat(others).sum()
    return own


def open_model(
    config: TrainerConfig,
    path: str,
    image_dir: str,
    *,
    trained: bool,
    device: torch.device,
    ranks: int = 1,
    lora: LoraSection | None = None,
    head: str = TEXT,
) -> Reader:
    """Load a model and what it needs to read rows, see how it does, and give it adapters. Raises DataError or ConfigError."""
    policy = load_policy(
        path,
        dtype=compute_dtype(config, device),
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        gradient_checkpointing=trained and config.train.gradient_checkpointing,
        lora=lora,
        freeze_vision=trained and config.model.freeze_vision,
        head=head,
        attention=config.model.attention,
    )
    pictures = None
    if policy.vision:
        pictures = load_pictures(path, ImageStore(image_dir), trust_remote_code=config.model.trust_remote_code)
    policy = check_pictures(policy, pictures)
    several, stage = trained and ranks > 1, config.parallel.zero_stage
    if (
        several
        and policy.vision
        and not policy.packs
        and (stage == 3 or (stage == 2 and not config.model.freeze_vision))
    ):
        raise ConfigError(
            f"--parallel.zero-stage {stage} on several ranks: {path} reads pictures row by row, so that not all ranks come to "
            "its vision half at the same time, and what they gather or reduce would be of different layers. Use stage 1."
        )
    return Reader(policy, pictures, device, always_look=several and policy.vision, in_step=several and stage == 3)


def check_vocabulary(config: TrainerConfig, path: str, model_path: str, flag: str) -> None:
    """Raises ConfigError when the tokens of another model are not the policy's."""
    if path != model_path and _vocabulary(path, config) != _vocabulary(model_path, config):
        raise ConfigError(f"{flag} {path} has another vocabulary than the policy: its tokens mean other things.")


def _vocabulary(path: str, config: TrainerConfig) -> dict[str, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """The type of weights and activations."""
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
