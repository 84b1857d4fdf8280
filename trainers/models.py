"""The policy: a Hugging Face language or vision-language model, and what the trainer must know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import LoraSection
from ..errors import ConfigError, DataError
from ..torchvision_ops import ensure_torchvision_imports
from .lora import adapters_off, add_adapters, drop_inputs
from .segments import register_segments


@dataclass(frozen=True)
class Policy:
    """A loaded model, in eval mode: dropout would change the ratio.

    packs: sequences may share a row (checked on this very model). separate_head: logits are the output embedding of
    the trunk's last hidden state and nothing more (checked), so they can be computed piece by piece.
    placeholders: ids that stand for pictures or videos; empty for a text model. image_id is None for a text model.
    adapted: LoRA adapters are trained, and nothing else.
    """

    model: Any
    packs: bool
    separate_head: bool
    image_id: int | None
    placeholders: tuple[int, ...]
    adapted: bool = False

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model is the one that LoRA started from. For passes without gradient only. Needs `adapted`."""
        if not self.adapted:
            raise ValueError("the policy has no adapters")
        with adapters_off(self.model):
            yield

    def drop_inputs(self, on: bool) -> None:
        """Switch the adapters' dropout, which is off outside of updates."""
        if self.adapted:
            drop_inputs(self.model, on)

    @property
    def vision(self) -> bool:
        return self.image_id is not None

    @property
    def trunk(self) -> Any:
        """The model without its output embedding."""
        return self.model.base_model

    @property
    def stand_in(self) -> int:
        """The id that is read where the policy sampled a placeholder: the first that is none."""
        return next(i for i in range(len(self.placeholders) + 1) if i not in self.placeholders)


def load_policy(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    lora: LoraSection | None = None,
) -> Policy:
    """Load a folder or hub id. Raises DataError when there is no model, ConfigError for a kind that cannot be trained."""
    model = load_model(path, dtype, trust_remote_code=trust_remote_code)
    vision = "vision_config" in model.config.sub_configs
    if vision and not hasattr(model.base_model, "get_rope_index"):
        raise ConfigError(
            f"{path} is a {model.config.model_type}: of the vision-language models only the Qwen-VL families can be trained."
        )
    if lora is not None and lora.enabled:
        add_adapters(model, lora)
    model.to(device).eval()
    if gradient_checkpointing:
        _recompute_activations(model)
    return _examined(model, vision)


def _recompute_activations(model: Any) -> None:
    """Layers look at their own `training` to decide; what is inside them stays in eval mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def load_model(path: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face model of a folder or hub id, with a head for text. Raises DataError when there is none."""
    ensure_torchvision_imports()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
        return auto.from_pretrained(path, config=config, dtype=dtype, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise DataError(f"The model {path} does not load: {error}") from error


def _examined(model: Any, vision: bool) -> Policy:
    """Find out by trying what this model can do."""
    packs = _try_packing(model, vision)
    placeholders: tuple[int, ...] = (model.config.image_token_id, model.config.video_token_id) if vision else ()
    return Policy(
        model=model,
        packs=packs,
        separate_head=_head_is_separate(model),
        image_id=placeholders[0] if vision else None,
        placeholders=placeholders,
        adapted=hasattr(model, "peft_config"),
    )


def _try_packing(model: Any, vision: bool) -> bool:
    """Switch to segment attention if it keeps packed sequences apart in this model; else leave the model as it was."""
    text, before = model.config.get_text_config(), model.config.get_text_config()._attn_implementation
    name = register_segments()
    try:
        model.set_attn_implementation({"text_config": name} if vision else name)
        if _packed_equals_alone(model, vision):
            return True
    except NotImplementedError:
        pass
    model.set_attn_implementation({"text_config": before} if text is not model.config else before)
    return False


@torch.no_grad()
def _packed_equals_alone(model: Any, vision: bool) -> bool:
    first, second = _probe(model, 5), _probe(model, 9)
    alone = trunk_states(model, second, text_positions((9,), vision), (9,))
    packed = trunk_states(model, torch.cat([first, second]), text_positions((5, 9), vision), (5, 9))
    scale = float(alone.abs().max())
    tolerance = 1e-4 if alone.dtype == torch.float32 else 5e-2
    return float((packed[5:] - alone).abs().max()) <= tolerance * scale


@torch.no_grad()
def _head_is_separate(model: Any) -> bool:
    ids = _probe(model, 4)
    states = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
    logits = model(input_ids=ids[None], use_cache=False).logits
    return bool(torch.allclose(model.get_output_embeddings()(states), logits, rtol=1e-3, atol=1e-3))


def _probe(model: Any, length: int) -> Tensor:
    """The first ids of the vocabulary: int64[length]."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.arange(length, device=model.device) * 7 % min(vocabulary, 100)


def text_positions(lengths: tuple[int, ...], vision: bool, device: torch.device | str = "cpu") -> Tensor:
    """Positions that start again at 0 with each sequence: [1, T], or [4, 1, T] (text, time, height, width) for M-RoPE."""
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    return positions.expand(4, 1, -1) if vision else positions


def trunk_states(model: Any, ids: Tensor, positions: Tensor, segments: tuple[int, ...], **pixels: Tensor) -> Tensor:
    """Last hidden states [T, H] of packed ids [T]. No cache and no mask: either would undo the packing silently."""
    output = model.base_model(
        input_ids=ids[None],
        position_ids=positions.to(ids.device),
        attention_mask=None,
        use_cache=False,
        segments=segments,
        **pixels,
    )
    states: Tensor = output.last_hidden_state[0]
    return states
