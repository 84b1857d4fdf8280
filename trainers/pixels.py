"""Pictures as the model's own image processor sees them, kept for as long as they fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from PIL import Image as PILImage
from torch import Tensor

from ..errors import DataError
from ..image_store import ImageStore
from ..torchvision_ops import ensure_torchvision_imports

Pixels = dict[str, Tensor]
"""What the image processor gives for one picture: pixel_values [patches, D], image_grid_thw [1, 3]."""
BLANK = "blank"
"""Stands for a black picture where a hash would stand."""


class PixelCache:
    """Processed pictures by hash; the least recently used go first when they take more than `max_bytes`."""

    def __init__(self, store: ImageStore, processor: Any, max_bytes: int = 2**29) -> None:
        self._store = store
        self._processor = processor
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Pixels] = OrderedDict()

    def get(self, sha: str, placeholders: int) -> Pixels:
        """The picture of a hash. Raises DataError when the model makes another number of tokens of it."""
        pixels = self._kept.get(sha)
        if pixels is None:
            pixels = self._process(sha)
        else:
            self._kept.move_to_end(sha)
        tokens = self._tokens(pixels)
        if tokens != placeholders:
            raise DataError(
                f"image {sha} has {placeholders} placeholders in a row, but is {tokens} tokens to the model"
            )
        return pixels

    def blank(self) -> int:
        """Tokens of the picture `BLANK`: a black one, as small as the processor allows."""
        return self._tokens(self._process(BLANK))

    def _tokens(self, pixels: Pixels) -> int:
        return int(pixels["image_grid_thw"].prod()) // self._processor.merge_size**2

    def _process(self, sha: str) -> Pixels:
        picture = PILImage.new("RGB", (28, 28)) if sha == BLANK else self._store.get(sha).pil
        out = self._processor(images=[picture], return_tensors="pt")
        pixels = {name: out[name] for name in ("pixel_values", "image_grid_thw")}
        self._bytes += _size(pixels) - _size(self._kept.get(sha, {}))
        self._kept[sha] = pixels
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return pixels


def _size(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())


def load_pictures(model_path: str, store: ImageStore, *, trust_remote_code: bool = False) -> PixelCache:
    """The cache with the model's own image processor."""
    ensure_torchvision_imports()
    from transformers import AutoImageProcessor

    return PixelCache(store, AutoImageProcessor.from_pretrained(model_path, trust_remote_code=trust_remote_code))
