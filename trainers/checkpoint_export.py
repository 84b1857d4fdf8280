"""A checkpoint as a Hugging Face folder, without the run, its ranks or its engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import LoraSection
from ..errors import DataError
from .checkpoint import TAG, UNIVERSAL, About
from .ema import read_average
from .export import adapter_weights, export_adapter, export_model, finish_reward_model, whole_weights
from .models import SCORE, choose_trained, load_model

_PREFIX = "policy_model."


class _Whole:
    """Stands for a backend whose weights are not sharded."""

    stage = 0

    def gathered(self, *tensors: Tensor) -> AbstractContextManager[None]:
        return nullcontext()


def export_checkpoint(folder: Path, out: Path, *, model: str | None = None, averaged: bool | None = None) -> None:
    """Write what the run would have exported: weights with adapters merged, tokenizer and all, the adapter in `adapter/`.

    `folder` was written by a run of any number of ranks; `model` = where the policy that it started from lies now;
    averaged: True = the moving average, False = the last weights, None = the average where there is one. Raises DataError.
    """
    about = About.read(folder)
    source = model or about.model
    policy = load_model(source, getattr(torch, about.dtype), trust_remote_code=about.trust_remote_code, head=about.head)
    choose_trained(policy, LoraSection(**about.lora), freeze_vision=about.freeze_vision, head=about.head)
    average = {} if averaged is False else read_average(folder / TAG)
    if averaged and not average:
        raise DataError(f"{folder} holds no averaged weights: it was written without --optim.ema")
    for weights in (_stored(folder, about), average):
        _put(policy, weights, source)
    out.mkdir(parents=True, exist_ok=True)
    whole: Any = _Whole()
    export_model(policy, whole_weights(policy, whole), source, out, about.config, about.chat_template)
    if about.head == SCORE:
        finish_reward_model(out, about.chat_template)
    if about.adapted:
        export_adapter(policy, adapter_weights(policy, whole), source, out)


def _stored(folder: Path, about: About) -> dict[str, Tensor]:
    """What the run trained, under the trainer's names; flat where it was sharded and is for any number of ranks."""
    if about.stage == 3 and (folder / TAG / UNIVERSAL).is_file():
        files = (folder / TAG / "zero").glob("*/fp32.pt")
        return {file.parent.name: torch.load(file, map_location="cpu", weights_only=True) for file in files}
    if about.stage == 3:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        masters: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
            str(folder), tag=TAG, exclude_frozen_parameters=about.adapted
        )
        return masters
    file = folder / TAG / "mp_rank_00_model_states.pt"
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=False)["module"]
    return weights


@torch.no_grad()
def _put(model: Any, weights: dict[str, Tensor], source: str) -> None:
    own = model.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        name = name.removeprefix(_PREFIX)
        flat = name in own and tensor.shape == (own[name].numel(),)
        if name not in own or not (flat or own[name].shape == tensor.shape):
            raise DataError(f"the checkpoint's weight {name} {list(tensor.shape)} does not fit the model {source}")
        own[name].copy_(tensor.view(own[name].shape))
