"""A reward model as a reward function: `--reward FOLDER` of a model that scores sequences.

A run has one process with the model, which every rollout worker asks; without Ray the model is loaded where it is asked. While
one batch is scored, the next gathers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ConfigError, EnvError, InfrastructureError
from .messages import Message, message_images, normalize
from .model_folder import model_config, resolve_model, scores_sequences

MAX_OPEN = 4096
"""Questions that the model's process takes at once."""
MAX_BATCH = 64
"""Completions scored in one pass."""


def is_reward_model(spec: str) -> bool:
    """Whether `--reward SPEC` is a folder. Raises ConfigError for one that holds no model that scores sequences."""
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        return False
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--reward {spec}: the folder holds no config.json, so it is no reward model.")
    if not scores_sequences(model_config(str(folder))):
        raise ConfigError(f"--reward {spec} is no reward model: its config names no …ForSequenceClassification.")
    return True


def model_reward(path: str, normalized: bool) -> Callable[..., Awaitable[float]]:
    """The reward function of a folder; its model is loaded when it is first asked. NaN = no verdict. `normalized` as in
    RewardModel. Raises ConfigError for no such folder.
    """
    model = _Asked(resolve_model(path, "--reward"), normalized)

    async def scored(prompt: Any, completion: str, images: Sequence[Any]) -> float:
        messages: list[Message] = normalize(prompt if prompt is not None else "")
        if images or message_images(messages):
            raise EnvError("a reward model reads text: it cannot judge an answer about pictures")
        return await model.ask(messages, completion)

    return scored


class _Asked:
    """The model behind a reward function: an actor that all rollout workers share, or without Ray a model of this process."""

    def __init__(self, path: str, normalized: bool) -> None:
        self._path, self._normalized = path, normalized
        self._actor: Any = None

    async def ask(self, messages: list[Message], completion: str) -> float:
        """The score. Raises InfrastructureError when the actor is lost; the next question starts another."""
        import ray

        if not ray.is_initialized():
            return await self._here.score(messages, completion)
        if self._actor is None:
            self._actor = self._shared_actor()
        try:
            score: float = await self._actor.score.remote(messages, completion)
            return score
        except ray.exceptions.RayActorError as error:
            self._actor = None
            raise InfrastructureError(f"the reward model's process is gone: {self._path}") from error

    @cached_property
    def _here(self) -> RewardModelActor:
        return RewardModelActor(self._path, normalized=self._normalized)

    def _shared_actor(self) -> Any:
        """The one process of this model in this run: whoever comes first starts it. On the CPU: GPUs are the engines'."""
        import ray

        name = "reward-model-" + hashlib.sha256(f"{self._path} {self._normalized}".encode()).hexdigest()[:12]
        actor = ray.remote(RewardModelActor).options(
            name=name, get_if_exists=True, num_cpus=0, max_concurrency=MAX_OPEN
        )
        return actor.remote(self._path, normalized=self._normalized)


class RewardModelActor:
    """A model in a process of its own; questions that come while it computes are answered together."""

    def __init__(self, path: str, *, normalized: bool = True) -> None:
        from .torchvision_ops import ensure_torchvision_imports

        ensure_torchvision_imports()
        import torch
        from transformers import AutoTokenizer

        from .reward_model import RewardModel

        torch.set_num_threads(1)
        template = "auto" if AutoTokenizer.from_pretrained(path).chat_template else "none"
        self.model: Callable[..., list[float]] = RewardModel(
            path, chat_template=template, device="cpu", normalized=normalized
        )
        self._waiting: list[tuple[list[Message], str, asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def score(self, messages: list[Message], completion: str) -> float:
        """Of one completion; NaN where the model cannot be shown it."""
        coming: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, completion, coming))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return await coming

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            prompts, completions = [one[0] for one in batch], [one[1] for one in batch]
            nothing = [""] * len(batch)
            try:
                scores = await asyncio.to_thread(self.model, prompts, completions, nothing, [False] * len(batch))
            except Exception as error:  # the fault boundary: whatever it is, those who asked are told
                for *_, coming in batch:
                    if not coming.done():
                        coming.set_exception(error)
                continue
            for (*_, coming), score in zip(batch, scores, strict=True):
                if not coming.done():
                    coming.set_result(score)
