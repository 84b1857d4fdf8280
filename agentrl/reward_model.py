"""A reward model: a Hugging Face sequence classifier with one label, whose score of a whole conversation is the reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import wire
from .assemble import load_processor
from .errors import AgentRLError, ConfigError, DataError
from .messages import Message, message_images, normalize
from .model_folder import (
    from_openrlhf,
    generation_stop_ids,
    max_positions,
    model_config,
    resolve_model,
    scores_sequences,
    takes_images,
)
from .renderer import Renderer
from .supervised.spelling import Speller

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
DEFAULT_LABELS = 2
"""Of a classifier whose config does not say; transformers' default."""
OPENRLHF_HEAD = {r"^value_head\.": "score."}
"""What the head of a reward model of OpenRLHF's was called before its version 0.11."""


def spell(speller: Speller, prompt: Any, completion: str) -> tuple[int, ...]:
    """A prompt (text or messages) with the assistant's reply in ids, up to the token that ends the reply: as `agentrl rm`
    spells what it trains on.

    Special tokens' strings in the reply are ordinary text. Raises DataError for what is no prompt of texts.
    """
    opening = wire.read_task({"id": "", "prompt": prompt}).prompt
    messages: list[Message] = normalize(opening if opening is not None else "")
    if message_images(messages):
        raise DataError("this reward model reads text, and the prompt has pictures")
    return speller.spell([*messages, {"role": "assistant", "content": completion}], last_only=True).token_ids


class RewardModel:
    """Scores completions in batches, without gradient: a function of lists, as the reward server takes it.

    Scores are read at the last token of each sequence. One that is longer than the model was made for loses its beginning;
    one that cannot be spelled has no verdict. Where `normalized`, scores are normalised by the mean and deviation in
    config.json, where `agentrl rm` (and OpenRLHF) wrote them; without them they stay as they are.
    """

    __name__ = "model"

    def __init__(
        self, path_or_id: str, *, chat_template: str = "auto", device: str = "auto", normalized: bool = True
    ) -> None:
        """Loads the model. Raises ConfigError for a folder without such a model."""
        folder = resolve_model(path_or_id)
        config = model_config(folder)
        if not scores_sequences(config):
            raise ConfigError(
                f"--model {path_or_id} is no reward model: its config names no …ForSequenceClassification."
            )
        theirs = from_openrlhf(config)
        labels = 1 if theirs else len(config["id2label"]) if "id2label" in config else DEFAULT_LABELS
        if labels != 1:
            raise ConfigError(f"--model {path_or_id} has {labels} labels; a reward model has one.")
        if takes_images(config):
            raise ConfigError(f"--model {path_or_id}: reward models that read pictures are not served.")
        self.longest = max_positions(config)
        kept = config if normalized else {}
        self._mean, self._std = float(kept.get("mean", 0.0)), float(kept.get("std", 1.0)) or 1.0
        self.renderer = Renderer(
            load_processor(folder, False), chat_template=chat_template, stop_ids=generation_stop_ids(folder)
        )
        self._speller = Speller(self.renderer)
        self._model = _load(folder, device, theirs)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], queries: Sequence[str], spelled: Sequence[bool]
    ) -> list[float]:
        """One score each; NaN = no verdict. Where `spelled`, the query is the text as the model sees it."""
        ids = [self._ids(*given) for given in zip(prompts, completions, queries, spelled, strict=True)]
        wanted = [i for i, sequence in enumerate(ids) if sequence]
        scores = [math.nan] * len(ids)
        for i, score in zip(wanted, self._scores([ids[i] for i in wanted]), strict=True):
            scores[i] = (score - self._mean) / self._std
        return scores

    def _ids(self, prompt: Any, completion: str, query: str, spelled: bool) -> tuple[int, ...]:
        try:
            if spelled:
                ids = tuple(self.renderer.tokenizer(query, add_special_tokens=False).input_ids)
            else:
                ids = spell(self._speller, prompt, completion)
        except AgentRLError as error:
            log.warning("no verdict: %s", error)
            return ()
        return ids if self.longest is None else ids[-self.longest :]

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One pass, padded on the right."""
        import torch

        if not sequences:
            return []
        width = max(map(len, sequences))
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        with torch.no_grad():
            scores: list[float] = self._read(ids.to(self._model.device), mask.to(self._model.device)).float().tolist()
        return scores

    def _read(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scores [N]. Decoders have a `score` on the last token's state; encoders pool as they do."""
        import torch

        if not hasattr(self._model, "score"):
            return self._model(input_ids=ids, attention_mask=mask).logits[:, 0]
        states = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = states[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
        return self._model.score(last)[:, 0]


def _load(folder: str, device: str, theirs: bool) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    dtype = torch.float32 if where == "cpu" else "auto"
    more: dict[str, Any] = {"num_labels": 1, "key_mapping": OPENRLHF_HEAD} if theirs else {}
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **more
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--model {folder} does not load: {error}") from error
    if info["missing_keys"]:
        raise ConfigError(f"--model {folder} is no whole reward model: {min(info['missing_keys'])} is missing.")
    return model.to(where).eval()
