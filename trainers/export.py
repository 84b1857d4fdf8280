"""The policy's weights as others read them: under checkpoint names for engines, as a Hugging Face folder for everyone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import AgentRLError
from ..model_folder import generation_stop_ids
from .backend import Backend
from .lora import adapted_layers, factors, is_adapter, merged_weight, merges, plain_name, save_adapter

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Tokenizer, processor, chat template, generation defaults, code: copied byte for byte."""

NEW_PAD = "<|pad|>"
"""The padding token of a reward model whose tokenizer has none but ends of texts."""


def whole_weights(model: Any, backend: Backend, *, keep: bool = True) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once (a tied one under its first name), by the names of the plain model.

    Adapters are merged into copies. Sharded weights are gathered one at a time, by all ranks together, and copied to the
    CPU; whole ones without an adapter are not copied. Ranks with keep False get an empty dict. Raises AgentRLError for an
    empty tensor.
    """
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    layers = adapted_layers(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or is_adapter(name):
            continue
        seen.add(id(tensor))
        layer = layers.get(merges(name) or "")
        with backend.gathered(tensor, *(factors(layer) if layer is not None else ())):
            if tensor.numel() == 0:
                raise AgentRLError(f"weight {name} is empty: it was not gathered")
            if keep:
                weights[plain_name(name)] = merged_weight(layer) if layer is not None else _whole(tensor, backend)
    return weights


def adapter_weights(model: Any, backend: Backend, *, keep: bool = True) -> dict[str, Tensor]:
    """What is trained beside a frozen model, its adapters and the head of a reward model, on the CPU, by the model's own names;
    gathered as in `whole_weights`.
    """
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters() if adapted_layers(model) else ():
        if parameter.requires_grad:
            with backend.gathered(parameter):
                if keep:
                    weights[name] = parameter.detach().cpu().clone()
    return weights


def _whole(tensor: Tensor, backend: Backend) -> Tensor:
    """A copy of what will be sharded again, the thing itself otherwise."""
    whole = tensor.detach()
    return whole.cpu().clone() if backend.stage == 3 else whole


def hub_weights(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names, and in the cut, of the checkpoint on disk (experts apart, old prefixes, …)."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return converted


def export_model(
    model: Any,
    weights: dict[str, Tensor],
    source: str,
    folder: Path,
    facts: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> None:
    """Write what `from_pretrained` reads: the weights of `whole_weights`, all but the weights of `source`, what is more to
    be in config.json, and a chat template in place of the source's.
    """
    for name, value in (facts or {}).items():
        setattr(model.config, name, value)
    model.save_pretrained(folder, state_dict=dict(weights))
    origin = _local(source)
    for pattern in _COPIED:
        for file in origin.glob(pattern):
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def export_adapter(model: Any, weights: dict[str, Tensor], source: str, folder: Path) -> None:
    """Write the adapter alone, in peft's format, beside the merged model."""
    save_adapter(model, weights, source, folder / "adapter")


def finish_reward_model(folder: Path, chat_template: str | None) -> None:
    """A padding token of its own; and no chat template where "" says that the run used none: who scores with the model looks
    there for what it was trained with.
    """
    pad_apart(folder)
    settings = folder / "tokenizer_config.json"
    if chat_template == "" and settings.is_file():
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        kept = {key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"}
        settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def pad_apart(folder: Path) -> None:
    """Give a reward model in `folder` a padding token that no text ends with: transformers reads the score at the last token
    that is not padding.
    """
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    if not (folder / "tokenizer_config.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {*generation_stop_ids(str(folder)), tokenizer.eos_token_id}
    special = [i for i, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special and i not in ends]
    if config.get("pad_token_id") in {None, *ends}:
        pad = tokenizer.convert_ids_to_tokens(special[0]) if special else NEW_PAD
        tokenizer.add_special_tokens({"pad_token": pad})
        tokenizer.save_pretrained(folder)
        if tokenizer.pad_token_id >= (config.get("text_config") or config)["vocab_size"]:
            _lengthen(folder, len(tokenizer))
            config = json.loads((folder / "config.json").read_text())
        config["pad_token_id"] = tokenizer.pad_token_id
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _lengthen(folder: Path, vocabulary: int) -> None:
    """Give a reward model on disk embeddings for that many tokens."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
    model.resize_token_embeddings(vocabulary)
    model.save_pretrained(folder)


def _local(source: str) -> Path:
    """The folder of a model: itself, or the snapshot in the cache that it was loaded from."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=list(_COPIED), local_files_only=True))
