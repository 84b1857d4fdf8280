"""Frozen models that judge the policy's tokens: the reference of the KL term, the teacher of distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..config import Config
from ..errors import ConfigError
from ..trajectory import Row
from .reading import Module, Reader, check_vocabulary, open_model
from .scorer import TokenScorer


class Reference(Protocol):
    """Anything that gives log-probs to tokens without learning."""

    def log_probs(self, rows: Sequence[Row]) -> list[Tensor]:
        """At the rollout temperature, of each row's trained tokens. The ranks call it as often as each other."""
        ...

    def rest(self) -> None:
        """The batch is scored; nothing is asked until the next."""
        ...


class FrozenPolicy:
    """A model of its own, whole on every rank. Offloaded, it is on the device only while a batch is scored."""

    def __init__(self, reader: Reader, temperature: float, *, offload: bool) -> None:
        self._reader = reader
        self._scorer = TokenScorer(reader.policy, temperature)
        self._scorer.requires_grad_(False)
        self._offload = offload
        self.rest()

    @torch.no_grad()
    def log_probs(self, rows: Sequence[Row]) -> list[Tensor]:
        self._scorer.to(self._reader.device)
        return self._reader(self._scorer, rows)[0]

    def rest(self) -> None:
        if self._offload:
            self._scorer.to("cpu")


class WithoutAdapters:
    """The model that LoRA adapters sit in, through the policy's own module: nothing is loaded twice."""

    def __init__(self, reader: Reader, module: Module) -> None:
        self._reader = reader
        self._module = module

    @torch.no_grad()
    def log_probs(self, rows: Sequence[Row]) -> list[Tensor]:
        with self._reader.policy.without_adapters():
            return self._reader(self._module, rows)[0]

    def rest(self) -> None:
        return


def open_reference(
    config: Config, model_path: str, image_dir: str, device: torch.device, *, own: tuple[Reader, Module]
) -> Reference | None:
    """The reference of the KL term: none where the coefficient is 0, the policy's first weights unless told otherwise.

    own = the policy's reader and module; with fresh adapters turned off it is its own reference.
    """
    if not config.algo.kl.coef:
        return None
    if config.lora.rank and config.ref.path is None:
        return WithoutAdapters(*own)
    path = config.ref.path or model_path
    check_vocabulary(config, path, model_path, "--ref.path")
    lora = config.lora if config.ref.path is None else None
    reader = open_model(config, path, image_dir, trained=False, device=device, lora=lora)
    return FrozenPolicy(reader, config.rollout.temperature, offload=config.ref.offload)


def open_teacher(config: Config, model_path: str, image_dir: str, device: torch.device) -> Reference:
    """The teacher of distillation. Raises ConfigError without a path, or when its tokens are not the policy's."""
    path = config.teacher.path
    if path is None:
        raise ConfigError("--algo distill learns from a teacher: name its model with --teacher.path.")
    check_vocabulary(config, path, model_path, "--teacher.path")
    reader = open_model(config, path, image_dir, trained=False, device=device)
    return FrozenPolicy(reader, config.rollout.temperature, offload=config.teacher.offload)
