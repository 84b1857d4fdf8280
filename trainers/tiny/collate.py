"""Demonstrations to model inputs: padded ids, targets and the pictures' patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.image_expansion import processed

from .demonstrations import Demonstration

IGNORED = -100


class Collator:
    """Pads on the right; every picture goes through the image processor once and is kept."""

    def __init__(self, processor: Any) -> None:
        self.tokenizer = processor.tokenizer if hasattr(processor, "image_processor") else processor
        self._image_processor = processor.image_processor if hasattr(processor, "image_processor") else None
        self._patches: dict[str, tuple[Any, Any]] = {}

    def __call__(self, batch: Sequence[Demonstration]) -> tuple[dict[str, Any], Any]:
        """(model inputs, labels [B, T]); labels are the ids of the targets, IGNORED elsewhere."""
        import torch

        longest = max(len(item.token_ids) for item in batch)
        ids = torch.full((len(batch), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        labels = torch.full((len(batch), longest), IGNORED)
        for row, item in enumerate(batch):
            length = len(item.token_ids)
            ids[row, :length] = torch.tensor(item.token_ids)
            mask[row, :length] = 1
            labels[row, item.target : length] = ids[row, item.target : length]
        return {"input_ids": ids, "attention_mask": mask, **self._pictures(batch, ids)}, labels

    def _pictures(self, batch: Sequence[Demonstration], ids: Any) -> dict[str, Any]:
        import torch

        pictures = [self._patch(image) for item in batch for image in item.images]
        if not pictures:
            return {}
        return {
            "pixel_values": torch.cat([patches for patches, _ in pictures]),
            "image_grid_thw": torch.cat([grid for _, grid in pictures]),
            "mm_token_type_ids": (ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int(),
        }

    def _patch(self, image: Any) -> tuple[Any, Any]:
        if image.sha256 not in self._patches:
            assert self._image_processor is not None
            made = processed(self._image_processor, image, return_tensors="pt")
            self._patches[image.sha256] = (made["pixel_values"], made["image_grid_thw"])
        return self._patches[image.sha256]
