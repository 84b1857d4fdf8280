"""Pictures as the model's own image processor sees them, kept for as long as they fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from PIL import Image as PILImage
from torch import Tensor

from ..assemble import load_processor
from ..errors import DataError
from ..image_expansion import ImageExpander, layout, processed
from ..image_store import ImageStore
from ..messages import Image

Pixels = dict[str, Tensor]
"""What the image processor gives for one picture, `_KEPT` of it. Pictures in a pack are joined along the first dimension:
pixel_values [patches, D] or [tiles, 3, H, W], and one row a picture of the others.
"""
_KEPT = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
BLANK = "blank"
"""Stands for a black picture where a hash would stand."""


class PixelCache:
    """Processed pictures by hash; the least recently used go first when they take more than `max_bytes`."""

    def __init__(self, store: ImageStore, processor: Any, max_bytes: int = 2**29) -> None:
        self._store = store
        self._processor = processor
        self._expander = ImageExpander(processor)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, tuple[Pixels, int]] = OrderedDict()

    def get(self, sha: str, placeholders: int) -> Pixels:
        """The picture of a hash. Raises DataError when the model makes another number of tokens of it."""
        if sha not in self._kept:
            self.keep(_blank() if sha == BLANK else self._store.get(sha), sha)
        self._kept.move_to_end(sha)
        pixels, tokens = self._kept[sha]
        if tokens != placeholders:
            raise DataError(
                f"image {sha} has {placeholders} placeholders in a row, but is {tokens} tokens to the model"
            )
        return pixels

    def blank(self) -> tuple[int, ...]:
        """The ids of the picture `BLANK`: a black one, as small as the processor allows."""
        return self.run(_blank())

    def run(self, image: Image) -> tuple[int, ...]:
        """The ids that stand for a picture."""
        return self._expander.expansion(image)

    def whole_inputs(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """What the model's own processor makes of a line of text with pictures in it."""
        text = "".join(f"a b {self._processor.image_token} c" for _ in images)
        shown = [image.pil for image in images]
        inputs = dict(self._processor(text=[text], images=shown, return_tensors="pt", **layout(self._processor)))
        return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}

    def keep(self, image: Image, sha: str | None = None) -> str:
        """Process a picture, and make room for it. Returns its hash."""
        sha = sha or image.sha256
        out = processed(self._processor.image_processor, image, return_tensors="pt")
        pixels = {name: _flat(name, out[name]) for name in _KEPT if name in out}
        self._kept[sha] = (pixels, len(self.run(image)))
        self._bytes += _size(pixels)
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1][0])
        return sha


def _blank() -> Image:
    return Image(PILImage.new("RGB", (28, 28)))


def _flat(name: str, tensor: Tensor) -> Tensor:
    """Tiles of one picture [1, tiles, 3, H, W] without the picture's own dimension."""
    return tensor[0] if name == "pixel_values" and tensor.ndim == 5 else tensor


def _size(pixels: Pixels) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())


def load_pictures(model_path: str, store: ImageStore, *, trust_remote_code: bool = False) -> PixelCache:
    """The cache with the model's own processor."""
    return PixelCache(store, load_processor(model_path, trust_remote_code))
