"""A reward model as a reward function: `--reward FOLDER` of a model that scores sequences.

A run has one process with the model, which every rollout worker asks; without Ray the model is loaded where it is asked.
Whoever asks, scores are computed in batches: while one is computed, the next gathers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import ConfigError, DataError, EnvError, InfrastructureError
from .messages import Message, normalize
from .model_folder import generation_stop_ids, model_config, resolve_model

MAX_BATCH_TOKENS = 16_384
MAX_OPEN = 4096
"""Questions that the model's process takes at once."""


def is_reward_model(spec: str) -> bool:
    """Whether `--reward SPEC` is the folder of a model that scores sequences."""
    file = Path(spec).expanduser() / "config.json"
    if not file.is_file():
        return False
    names = json.loads(file.read_text()).get("architectures") or []
    return any("ForSequenceClassification" in name for name in names)


class RewardModel:
    """Scores conversations. What `agentrl rm` wrote is normalised by the mean and deviation in its config.json."""

    def __init__(self, path: str) -> None:
        from .torchvision_ops import ensure_torchvision_imports

        ensure_torchvision_imports()
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from .renderer import Renderer
        from .supervised.spelling import Speller

        torch.set_num_threads(1)
        self.path = resolve_model(path, "--reward")
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        template = "auto" if tokenizer.chat_template else "none"
        renderer = Renderer(tokenizer, chat_template=template, stop_ids=generation_stop_ids(self.path))
        self._speller = Speller(renderer)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForSequenceClassification.from_pretrained(self.path).to(self._device).eval()
        if self._model.config.num_labels != 1:
            raise ConfigError(f"--reward {path} gives {self._model.config.num_labels} numbers a text, not one.")
        config = model_config(self.path)
        self._mean, self._std = float(config.get("mean", 0.0)), float(config.get("std", 1.0)) or 1.0

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """One number each, read at the token that ends the last turn, which is the assistant's. Raises DataError."""
        import torch

        spelled = [self._speller.spell(messages, last_only=True).token_ids for messages in conversations]
        if not all(spelled):
            raise DataError("a reward model scores conversations that end with a reply")
        scores = [0.0] * len(spelled)
        with torch.inference_mode():
            for batch in _batches([len(ids) for ids in spelled]):
                for i, score in zip(batch, self._together([spelled[i] for i in batch]), strict=True):
                    scores[i] = (score - self._mean) / self._std
        return scores

    def _together(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Raw scores of rows padded on the right, read at each one's last token, whatever the padding is."""
        import torch

        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self._device)
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        states = self._model.base_model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
        last = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        scores = self._model.score(states[torch.arange(len(rows), device=self._device), last])[:, 0]
        values: list[float] = scores.float().tolist()
        return values


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in batches of like lengths that take at most MAX_BATCH_TOKENS with their padding."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > MAX_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


def conversation(prompt: Any, completion: str, images: Sequence[Any] = ()) -> list[Message]:
    """What is scored of a single turn. Raises EnvError for a prompt with pictures: reward models read text."""
    if images:
        raise EnvError("a reward model reads text: it cannot judge an answer about pictures")
    return [*normalize(prompt if prompt is not None else ""), {"role": "assistant", "content": completion}]


def model_reward(path: str) -> Callable[..., Awaitable[float]]:
    """The reward function of a folder; its model is loaded when it is first asked. Raises ConfigError for no such folder."""
    model = _Asked(resolve_model(path, "--reward"))

    async def scored(prompt: Any, completion: str, images: Any) -> float:
        return await model.ask(conversation(prompt, completion, images))

    return scored


def scored_lists(path: str) -> Callable[..., list[float]]:
    """The reward function of a folder for `agentrl serve reward`: the model is loaded here and now."""
    model = RewardModel(path)

    def scored(prompts: list[Any], completions: list[str]) -> list[float]:
        return model.score([conversation(*pair) for pair in zip(prompts, completions, strict=True)])

    return scored


class _Asked:
    """The model behind a reward function: an actor that all rollout workers share, or without Ray a model of this process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._actor: Any = None

    async def ask(self, messages: list[Message]) -> float:
        """The score. Raises InfrastructureError when the actor is lost; the next question starts another."""
        import ray

        if not ray.is_initialized():
            return (await asyncio.to_thread(self._here.score, [messages]))[0]
        if self._actor is None:
            self._actor = self._shared_actor()
        try:
            score: float = (await self._actor.score.remote([messages]))[0]
            return score
        except ray.exceptions.RayActorError as error:
            self._actor = None
            raise InfrastructureError(f"the reward model's process is gone: {self._path}") from error

    @cached_property
    def _here(self) -> RewardModel:
        return RewardModel(self._path)

    def _shared_actor(self) -> Any:
        """The one process of this model in this run: whoever comes first starts it."""
        import ray

        name = "reward-model-" + hashlib.sha256(self._path.encode()).hexdigest()[:12]
        actor = ray.remote(RewardModelActor).options(
            name=name, get_if_exists=True, num_cpus=0, max_concurrency=MAX_OPEN
        )
        return actor.remote(self._path)


class RewardModelActor:
    """A model in a process of its own; questions that come while it computes are answered together."""

    def __init__(self, path: str) -> None:
        self._model = RewardModel(path)
        self._waiting: list[tuple[list[Message], asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def score(self, conversations: list[list[Message]]) -> list[float]:
        """As RewardModel.score."""
        loop = asyncio.get_running_loop()
        coming: list[asyncio.Future[float]] = [loop.create_future() for _ in conversations]
        self._waiting += zip(conversations, coming, strict=True)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return list(await asyncio.gather(*coming))

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                scores = await asyncio.to_thread(self._model.score, [messages for messages, _ in batch])
            except Exception as error:  # the fault boundary: whatever it is, those who asked are told
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)
