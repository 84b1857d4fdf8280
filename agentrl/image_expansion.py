"""How many tokens an image takes, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import DataError
from .messages import Image
from .trajectory import ImageSlot


class ImageExpander:
    """Replaces the single placeholder that a chat template prints by the run of ids the model's processor makes of it.

    The run depends on the size of a picture alone, so it is asked for once a size.
    """

    def __init__(self, tokenizer_or_processor: Any) -> None:
        self._processor = tokenizer_or_processor if hasattr(tokenizer_or_processor, "image_token") else None
        self._token = self._processor.image_token if self._processor is not None else ""
        self._id: int | None = None
        if self._processor is not None:
            self._id = int(self._processor.tokenizer.convert_tokens_to_ids(self._token))
        self._by_size: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of image and video placeholders."""
        if self._processor is None or self._id is None:
            return frozenset()
        ids = {self._id}
        if hasattr(self._processor, "video_token"):
            ids.add(int(self._processor.tokenizer.convert_tokens_to_ids(self._processor.video_token)))
        return frozenset(ids)

    def expansion(self, image: Image) -> tuple[int, ...]:
        """The ids that stand for this image. Raises DataError for a model without images."""
        if self._processor is None:
            raise DataError("there is an image in the conversation, and this model takes none")
        if image.size not in self._by_size:
            self._by_size[image.size] = self._ask_processor(image)
        return self._by_size[image.size]

    def _ask_processor(self, image: Image) -> tuple[int, ...]:
        assert self._processor is not None
        ids = [int(i) for i in self._processor(text=[self._token], images=[image.pil])["input_ids"][0]]
        tokenizer = self._processor.tokenizer
        if ids and ids[0] == tokenizer.bos_token_id:
            ids = ids[1:]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        return tuple(ids)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[tuple[int, ...], tuple[ImageSlot, ...]]:
        """(ids with every placeholder expanded, the slot of each image counted from the first id)."""
        places = sum(1 for i in ids if i == self._id)
        if places != len(images):
            raise DataError(
                f"the chat template made {places} places for {len(images)} images: is it a template for images?"
            )
        out: list[int] = []
        slots: list[ImageSlot] = []
        rest = iter(images)
        for i in ids:
            if i != self._id:
                out.append(i)
                continue
            image = next(rest)
            run = self.expansion(image)
            slots.append((image.sha256, len(out), len(run)))
            out += run
        return tuple(out), tuple(slots)
