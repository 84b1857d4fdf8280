"""Which model a command runs: the one that was named, or agentrl's own tiny policy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

from ..config import Config, SupervisedConfig
from ..errors import ConfigError
from ..model_folder import resolve_adapter, resolve_model
from .console import ProgressCallback, ProgressMode, progress_bar

C = TypeVar("C", Config, SupervisedConfig)


def tiny_kind(uses_images: bool) -> str:
    """The tiny policy for a kind of input."""
    return "tiny-vlm" if uses_images else "tiny-text"


def choose_model(config: Config | SupervisedConfig, uses_images: bool, gpus: float, *, trained: bool = True) -> str:
    """The model's folder. Without --model a CPU machine gets a tiny policy, made first when the cache has none; not
    `trained`, any policy of its shape will do.

    Raises ConfigError for a model that is not there, and for none where a GPU waits.
    """
    if config.model.path is not None:
        return resolve_model(config.model.path)
    kind = tiny_kind(uses_images)
    if gpus > 0:
        raise ConfigError(
            f"This machine has a GPU: say which model to use with --model FOLDER_OR_HUB_ID. `agentrl init {kind}` makes "
            "agentrl's own tiny policy and prints its folder."
        )
    return tiny_policy(kind) if trained else untrained_tiny(kind)


def with_folders(config: C) -> C:
    """The configuration as trainers get it: with the folders of the models beside the policy (fetched, where they are hub
    ids) and of the adapter it starts from, wherever a trainer runs. Raises ConfigError for one that is not there.
    """
    sections = [name for name in ("critic", "ref", "teacher", "lora") if name in type(config).model_fields]
    named = {name: getattr(config, name) for name in sections}
    found = {}
    for name, section in named.items():
        if section.path is not None:
            resolve = resolve_adapter if name == "lora" else resolve_model
            found[name] = section.model_copy(update={"path": resolve(section.path, f"--{name}.path")})
    return config.model_copy(update=found)


def tiny_policy(kind: str, progress: ProgressMode = "auto") -> str:
    """The cached tiny policy's folder, made first when it is missing."""
    from agentrl.trainers.tiny import cached_tiny, tiny_path

    folder = tiny_path(kind)
    if (folder / "config.json").is_file():
        return str(folder)
    with making(progress) as bar:
        return str(cached_tiny(kind, progress=bar))


@contextmanager
def making(progress: ProgressMode = "auto") -> Iterator[ProgressCallback]:
    """The progress of a tiny policy. What libraries print meanwhile goes to stderr, and their own bars are off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with redirect_stdout(sys.stderr), progress_bar(progress) as bar:
        yield bar


def untrained_tiny(kind: str) -> str:
    """A folder with the tiny policy's tokenizer or processor, for engines without a model: the policy's own where it is
    cached, else one that skips the training.
    """
    from agentrl.trainers.tiny import make_tiny, tiny_path

    trained = tiny_path(kind)
    untrained = trained.with_name(f"{trained.name}-untrained")
    for folder in (trained, untrained):
        if (folder / "config.json").is_file():
            return str(folder)
    with making("none"):
        return str(make_tiny(kind, untrained, max_steps=0))
