"""Which model a command runs: the one that was named, or agentrl's own tiny policy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

from ..config import Config, SupervisedConfig
from ..errors import ConfigError
from ..model_folder import check_model, resolve_adapter, resolve_model
from .console import ProgressCallback, ProgressMode, progress_bar

C = TypeVar("C", Config, SupervisedConfig)


def tiny_kind(uses_images: bool) -> str:
    """The tiny policy for a kind of input."""
    return "tiny-vlm" if uses_images else "tiny-text"


def choose_model(
    config: Config | SupervisedConfig, uses_images: bool, gpus: float, *, trained: bool = True, weights: bool = True
) -> str:
    """The model's folder, which without `weights` need hold none. Without --model a CPU machine gets a tiny policy, made
    first when the cache has none; not `trained`, any policy of its shape will do.

    Raises ConfigError for a model that is not there or cannot be loaded, and for none where a GPU waits.
    """
    if config.model.path is not None:
        folder = resolve_model(config.model.path)
        check_model(folder, trust_remote_code=config.model.trust_remote_code, weights=weights)
        return folder
    kind = tiny_kind(uses_images)
    if gpus > 0:
        raise ConfigError(
            f"This machine has a GPU: say which model to use with --model FOLDER_OR_HUB_ID. `agentrl init {kind}` makes "
            "agentrl's own tiny policy and prints its folder."
        )
    return tiny_policy(kind) if trained else untrained_tiny(kind)


def with_folders(config: C) -> C:
    """The configuration as trainers get it: with the folders of the models beside the policy (fetched, where they are hub
    ids) and of the adapter it starts from, wherever a trainer runs. Raises ConfigError for one that is not there or cannot be
    loaded.
    """
    found = {}
    for name in ("critic", "ref", "teacher", "lora"):
        section = getattr(config, name, None)
        if section is not None and section.path is not None:
            path = _resolved(name, section.path, config.model.trust_remote_code)
            found[name] = section.model_copy(update={"path": path})
    return config.model_copy(update=found)


def _resolved(name: str, path: str, trust_remote_code: bool) -> str:
    flag = f"--{name}.path"
    if name == "lora":
        return resolve_adapter(path, flag)
    folder = resolve_model(path, flag)
    check_model(folder, flag, trust_remote_code=trust_remote_code)
    return folder


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
