"""LoRA (Hu 2021) by peft: adapters inside the model's own layers, and what the model weighs with them merged.

The model keeps its class. An adapted layer `q_proj` holds the frozen weight as `q_proj.base_layer.weight` and the
adapter as `q_proj.lora_A.default.weight`, `q_proj.lora_B.default.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import LoraSection
from ..errors import ConfigError, DataError
from ..registry import suggest

NAME = "default"
ALL_LINEAR = "all-linear"
_BASE = ".base_layer"
_PEFT_PREFIX = "base_model.model."
_UNMERGEABLE = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters")


def add_adapters(model: Any, config: LoraSection, *, frozen: Sequence[str] = ()) -> None:
    """Freeze the model and put trainable adapters into its layers, in place.

    frozen = names of modules within which nothing is adapted. A fresh adapter changes nothing: its B is zero. Raises
    ConfigError for targets that are not there or cannot be adapted, DataError for a folder without an adapter of this
    model.
    """
    from peft import inject_adapter_in_model

    settings = _fresh(model, config, frozen) if config.path is None else _stored(config.path, config.dropout)
    try:
        inject_adapter_in_model(settings, model, NAME)
    except ValueError as error:
        raise DataError(f"--lora.path {config.path} does not fit the model: {error}") from error
    if config.path is not None:
        _load(model, config.path)


def _fresh(model: Any, config: LoraSection, frozen: Sequence[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha or 2 * config.rank,
        lora_dropout=config.dropout,
        target_modules=_targets(model, config.targets, frozen),
    )


def _targets(model: Any, wanted: Sequence[str], frozen: Sequence[str]) -> list[str]:
    """Full names of the layers to adapt, none of them inside what is frozen."""
    from transformers.pytorch_utils import Conv1D

    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(_within(name, part) for part in frozen)
    ]
    head = model.get_output_embeddings()
    if not wanted or list(wanted) == [ALL_LINEAR]:
        return [name for name in linear if model.get_submodule(name) is not head]
    found = [name for name in linear if any(name == target or name.endswith(f".{target}") for target in wanted)]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"--lora.targets {target}: the trained part of the model has no linear layer of this name."
                f"{suggest(target, ends)} It has {', '.join(ends)}."
            )
    if (
        head is not None
        and any(model.get_submodule(name) is head for name in found)
        and head.weight is model.get_input_embeddings().weight
    ):
        raise ConfigError(
            "--lora.targets: the output head shares its weight with the input embedding and cannot be adapted."
        )
    return found


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _stored(path: str, dropout: float) -> Any:
    """The settings of an adapter on disk, but for its dropout. Raises ConfigError for a kind that no merged weight is equal
    to.
    """
    from peft import LoraConfig, PeftConfig

    try:
        settings = PeftConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise DataError(f"--lora.path {path} holds no adapter: {error}") from error
    unusual = [name for name in _UNMERGEABLE if getattr(settings, name, None)]
    if not isinstance(settings, LoraConfig) or settings.bias != "none" or unusual:
        kind = ", ".join(unusual) or f"{settings.peft_type} with bias {getattr(settings, 'bias', 'none')}"
        raise ConfigError(f"--lora.path {path}: adapters with {kind} cannot be trained; plain LoRA can.")
    settings.inference_mode, settings.lora_dropout = False, dropout
    return settings


def _load(model: Any, path: str) -> None:
    from peft.utils import load_peft_weights

    own = dict(model.named_parameters())
    stored = {_own_name(name): tensor for name, tensor in load_peft_weights(path, device="cpu").items()}
    wanted = {name for name in own if is_adapter(name)}
    if stored.keys() != wanted:
        odd = sorted(stored.keys() ^ wanted)
        raise DataError(f"--lora.path {path} is no adapter of this model: {len(odd)} weights differ, such as {odd[0]}.")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def _own_name(stored: str) -> str:
    """`base_model.model.x.lora_A.weight` -> `x.lora_A.default.weight`."""
    stem, _, leaf = stored.removeprefix(_PEFT_PREFIX).rpartition(".")
    return f"{stem}.{NAME}.{leaf}"


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's matrix."""
    return ".lora_A." in name or ".lora_B." in name


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that hold an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merges(name: str) -> str | None:
    """The name of the adapted layer whose own weight this is; None for every other parameter."""
    stem = name.removesuffix(".weight")
    return stem.removesuffix(_BASE) if stem != name and stem.endswith(_BASE) else None


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(f"{_BASE}.", ".")


def factors(layer: Any) -> list[Tensor]:
    """A and B of an adapted layer: [rank, in] and [out, rank]."""
    return [layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + alpha / rank * B A, summed in float32 and rounded once to W's type; a new tensor on the CPU."""
    weight = layer.get_base_layer().weight
    low, high = (factor.float() for factor in factors(layer))
    change = (high @ low) * layer.scaling[NAME]
    whole = weight.float() + (change.T if layer.fan_in_fan_out else change)
    return whole.to(weight.dtype).cpu()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did without adapters. For passes without gradient only."""
    layers = list(adapted_layers(model).values())
    with torch.no_grad():
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def drop_inputs(model: nn.Module, on: bool) -> None:
    """Switch the adapters' dropout; everything else stays in eval mode."""
    for layer in adapted_layers(model).values():
        layer.lora_dropout.train(on)


def save_adapter(model: Any, weights: dict[str, Tensor], base: str, folder: Path) -> None:
    """An adapter folder that peft loads onto `base`. weights = the adapter's and of layers
    trained as a whole, by the model's own names.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    settings = model.peft_config[NAME]
    inference, settings.inference_mode = settings.inference_mode, True
    settings.base_model_name_or_path = base
    heads = sorted({name.partition(".")[0] for name in weights if not is_adapter(name)})
    settings.modules_to_save = heads or None
    settings.save_pretrained(folder)
    settings.inference_mode, settings.modules_to_save = inference, None
    stored = {_PEFT_PREFIX + name.replace(f".{NAME}.", "."): tensor for name, tensor in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "adapter_model.safetensors")
