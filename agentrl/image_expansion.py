"""How many tokens an image takes, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import DataError
from .messages import Image
from .trajectory import ImageSlot


class ImageExpander:
    """Replaces the single placeholder that a chat template prints by the run of ids the model's processor makes of it.

    The run depends on the size of a picture alone, so it is asked for once a size. `placeholders` are the strings, and
    `placeholder_ids` the ids, that stand for images and videos.
    """

    def __init__(self, tokenizer_or_processor: Any) -> None:
        self._processor = tokenizer_or_processor if hasattr(tokenizer_or_processor, "image_token") else None
        self.placeholders: tuple[str, ...] = ()
        self._id: int | None = None
        self._by_size: dict[tuple[int, int], tuple[int, ...]] = {}
        if self._processor is not None:
            video = self._processor.video_token if hasattr(self._processor, "video_token") else None
            self.placeholders = (self._processor.image_token, *([video] if video else []))
            self._id = self._token_id(self._processor.image_token)
        self.placeholder_ids = frozenset(self._token_id(string) for string in self.placeholders)

    def _token_id(self, string: str) -> int:
        assert self._processor is not None
        return int(self._processor.tokenizer.convert_tokens_to_ids(string))

    def check(self, images: Sequence[Image]) -> None:
        """Raises DataError when there are images and the model takes none."""
        if images and self._processor is None:
            raise DataError("there is an image in the conversation, and this model takes none")

    def expansion(self, image: Image) -> tuple[int, ...]:
        """The ids that stand for this image. Raises DataError for a model without images, and for one it refuses."""
        self.check([image])
        if image.size not in self._by_size:
            self._by_size[image.size] = self._ask_processor(image)
        return self._by_size[image.size]

    def _ask_processor(self, image: Image) -> tuple[int, ...]:
        assert self._processor is not None
        made = processed(self._processor, image, text=[self._processor.image_token])
        ids = [int(i) for i in made["input_ids"][0]]
        tokenizer = self._processor.tokenizer
        if ids and ids[0] == tokenizer.bos_token_id:
            ids = ids[1:]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        return tuple(ids)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[tuple[int, ...], tuple[ImageSlot, ...]]:
        """(ids with every placeholder expanded, the slot of each image counted from the first id).

        Raises DataError unless there is one image placeholder an image, and none for videos.
        """
        places = sum(1 for i in ids if i in self.placeholder_ids)
        if places != len(images) or any(i != self._id for i in self.placeholder_ids.intersection(ids)):
            raise DataError(
                f"the chat template made {places} places for {len(images)} images: is it a template for images?"
            )
        out: list[int] = []
        slots: list[ImageSlot] = []
        rest = iter(images)
        for i in ids:
            run = self.expansion(image := next(rest)) if i == self._id else (i,)
            if i == self._id:
                slots.append((image.sha256, len(out), len(run)))
            out += run
        return tuple(out), tuple(slots)

    def find(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[ImageSlot, ...]:
        """The slot of each image in ids that have every placeholder expanded. Raises DataError for any other ids."""
        slots: list[ImageSlot] = []
        place = 0
        for image in images:
            run = self.expansion(image)
            place = next((i for i in range(place, len(ids)) if tuple(ids[i : i + len(run)]) == run), len(ids))
            slots.append((image.sha256, place, len(run)))
            place += len(run)
        inside = {place for _, start, count in slots for place in range(start, start + count)}
        if place > len(ids) or any(i in self.placeholder_ids and at not in inside for at, i in enumerate(ids)):
            raise DataError(f"the image placeholders among {len(ids)} tokens are not those of {len(images)} images")
        return tuple(slots)


def processed(processor: Any, image: Image, **options: Any) -> Any:
    """What a processor, or its image processor alone, makes of one picture. Raises DataError for one that it refuses."""
    try:
        return processor(images=[image.pil], **options, **layout(processor))
    except Exception as error:  # each model's processor raises what it likes
        width, height = image.size
        raise DataError(f"the model takes no picture of {width}x{height} pixels: {error}") from error


def layout(processor: Any) -> dict[str, str]:
    """The option that tells a processor where the channels are: of a picture one or three pixels high, or wide, it would
    guess. Processors that work on torch tensors put them first; the others know where PIL has them.
    """
    inner = processor.image_processor if hasattr(processor, "image_processor") else processor
    on_tensors = hasattr(inner, "backend") and inner.backend == "torchvision"
    return {"input_data_format": "channels_first"} if on_tensors else {}
