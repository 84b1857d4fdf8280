"""Pictures as the model's own image processor sees them, kept for as long as they fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from ..errors import DataError
from ..image_store import ImageStore
from ..torchvision_ops import ensure_torchvision_imports

Pixels = dict[str, Tensor]
"""What the image processor gives for one picture: pixel_values [patches, D], image_grid_thw [1, 3]."""


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
        tokens = int(pixels["image_grid_thw"].prod()) // self._processor.merge_size**2
        if tokens != placeholders:
            raise DataError(
                f"image {sha} has {placeholders} placeholders in a row, but is {tokens} tokens to the model"
            )
        return pixels

    def _process(self, sha: str) -> Pixels:
        out = self._processor(images=[self._store.get(sha).pil], return_tensors="pt")
        pixels = {name: out[name] for name in ("pixel_values", "image_grid_thw")}
        self._kept[sha] = pixels
        self._bytes += _size(pixels)
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
