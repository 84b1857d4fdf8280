"""What a Hugging Face model folder says about itself, read without loading a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .torchvision_ops import ensure_torchvision_imports


def resolve_model(path_or_id: str, flag: str = "--model") -> str:
    """A local folder for a path or a hub id (fetched into the hub's cache). Raises ConfigError, which names the flag."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{flag} {path_or_id}: the folder holds no config.json, so it is no Hugging Face model.")
        return str(folder.resolve())
    if _is_path(path_or_id):
        raise ConfigError(f"{flag} {path_or_id}: there is no such folder.")
    return _fetch(path_or_id, flag)


def resolve_adapter(path_or_id: str, flag: str) -> str:
    """A local folder for the path of an adapter in peft's format; a hub id as it is. Raises ConfigError as resolve_model."""
    folder = Path(path_or_id).expanduser()
    if (folder / "adapter_config.json").is_file():
        return str(folder.resolve())
    if folder.is_dir():
        raise ConfigError(f"{flag} {path_or_id}: the folder holds no adapter_config.json, so it is no adapter.")
    if _is_path(path_or_id):
        raise ConfigError(f"{flag} {path_or_id}: there is no such folder.")
    return path_or_id


def _is_path(path_or_id: str) -> bool:
    """Whether it can only be a path: hub ids are OWNER/NAME."""
    return path_or_id.startswith(("/", ".", "~")) or path_or_id.count("/") != 1


def _fetch(hub_id: str, flag: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(
            hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{flag} {hub_id}: no such folder here, and the hub does not give it: {reason}") from error


def check_model(folder: str, flag: str = "--model", *, trust_remote_code: bool = False, weights: bool = True) -> None:
    """Whether transformers knows the model in a folder and, where `weights` are asked for, its safetensors are whole, without
    loading them. Raises ConfigError.
    """
    ensure_torchvision_imports()
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise does_not_load(folder, flag, trust_remote_code, error) from error
    if weights:
        _check_weights(Path(folder), flag)


def does_not_load(folder: str, flag: str, trust_remote_code: bool, error: Exception) -> ConfigError:
    """What is said of a model, tokenizer or processor that transformers refuses."""
    brings = any("auto_map" in _read(file) for file in Path(folder).glob("*config.json"))
    if brings and not trust_remote_code:
        return ConfigError(
            f"{flag} {folder} brings Python code of its own, which runs with --model.trust-remote-code alone."
        )
    reason = (str(error).strip() or type(error).__name__).split("\n\n")[0]
    return ConfigError(f"{flag} {folder} does not load: {' '.join(reason.split())}")


def _check_weights(folder: Path, flag: str) -> None:
    """The safetensors files are there, those that an index names too, and as long as their headers say."""
    from safetensors import SafetensorError, safe_open

    files = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        files |= {folder / name for name in _read(index).get("weight_map", {}).values()}
    if not files and not list(folder.glob("*.bin")):
        raise ConfigError(f"{flag} {folder}: the folder holds no weights.")
    for file in sorted(files):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{flag} {folder}: {file.name} cannot be read: {error}") from error


def model_config(folder: str) -> dict[str, Any]:
    """config.json as it stands."""
    return _read(Path(folder) / "config.json")


SMALL_BYTES = 32_000_000


def is_small(folder: str) -> bool:
    """Whether the weights take less than SMALL_BYTES, as those of agentrl's own tiny policies do."""
    return 0 < sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) < SMALL_BYTES


def takes_images(config: dict[str, Any]) -> bool:
    """Whether a model's config has a vision tower."""
    return "vision_config" in config


def scores_sequences(config: dict[str, Any]) -> bool:
    """Whether a model scores whole sequences, as reward models do."""
    names = config.get("architectures") or ()
    return from_openrlhf(config) or any("ForSequenceClassification" in name for name in names)


def from_openrlhf(config: dict[str, Any]) -> bool:
    """Whether it is a reward model that OpenRLHF saved: a sequence classifier with one label, under a name of its own."""
    return "RewardModel" in (config.get("architectures") or ())


def generation_stop_ids(folder: str) -> tuple[int, ...]:
    """The end-of-sequence ids that config.json and generation_config.json name."""
    ids: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        eos = _read(path).get("eos_token_id") if path.is_file() else None
        ids += eos if isinstance(eos, list) else [eos]
    return tuple(sorted({int(i) for i in ids if i is not None}))


def max_positions(config: dict[str, Any]) -> int | None:
    """Longest context the model was made for, in tokens."""
    for part in (config.get("text_config") or {}, config):
        if part.get("max_position_embeddings"):
            return int(part["max_position_embeddings"])
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
