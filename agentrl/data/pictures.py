"""Pictures of a row, in every form they come in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image as PILImage

from ..config import DataSection
from ..errors import DataError
from ..messages import Image
from .fetch import fetch

HOLDERS = ("bytes", "image", "path", "url", "base64")
"""Keys of a dict that hold the picture, in the order in which they are asked."""
INLINE = "data:image/png;base64,"
LONGEST_PATH = 4096
BLANK = Image(PILImage.new("RGB", (1, 1)))


@dataclass(frozen=True)
class Album:
    """Where pictures are from: paths are relative to `folder`. `unseen` = nothing is opened or fetched, and every picture
    is a blank one: for counting them.
    """

    folder: Path
    section: DataSection
    unseen: bool = False

    def all(self, value: Any) -> tuple[Image, ...]:
        """The pictures of a cell: none, one, or a list; an empty cell of a csv file has none. Raises DataError."""
        items = value if isinstance(value, list | tuple) else [] if value in (None, "") else [value]
        return tuple(self.one(item) for item in items)

    def one(self, item: Any) -> Image:
        """Raises DataError."""
        return BLANK if self.unseen else read_picture(item, self.folder, self.section)


def read_picture(item: Any, folder: Path, section: DataSection) -> Image:
    """One picture: a path (relative to `folder`), bytes, {bytes, path}, a data URL, PIL, or, where `allow_urls` says so, a
    URL. As many pixels as `min_pixels` and `max_pixels` allow. Not decoded yet unless it has to be resized.
    """
    if isinstance(item, dict):
        return read_picture(_held(item), folder, section)
    if isinstance(item, str):
        item = _named(item, folder, section)
    return bounded(Image(item), section.min_pixels, section.max_pixels)


def _held(picture: dict[str, Any]) -> Any:
    """What is in an object. Bytes that are text, as JSON has none, are base64."""
    key = next((key for key in HOLDERS if picture.get(key) is not None), None)
    if key is None:
        raise DataError(
            f"a picture as an object has one of {', '.join(HOLDERS)}; this has {', '.join(picture) or 'none'}"
        )
    found = picture[key]
    return f"{INLINE}{found}" if key in ("base64", "bytes") and isinstance(found, str) else found


def _named(name: str, folder: Path, section: DataSection) -> str | bytes | Path:
    if name.startswith("data:"):
        return name
    if not name.startswith(("http://", "https://")):
        if len(name) > LONGEST_PATH:
            raise DataError(f"{name[:40]}… is too long for a path: base64 has {INLINE!r} before it")
        return folder / name.removeprefix("file://")
    if not section.allow_urls:
        raise DataError(f"{name[:80]}: images are fetched from the network only with --data.allow-urls")
    return fetch(name)


def bounded(image: Image, least: int | None, most: int | None) -> Image:
    """The image, resized to within `least` and `most` pixels, in its proportions as far as whole pixels have them."""
    if least is None and most is None:
        return image
    width, height = image.size
    pixels = width * height
    wanted = max(pixels, least or 0) if most is None else min(max(pixels, least or 0), most)
    if wanted == pixels:
        return image
    scale, rounded = math.sqrt(wanted / pixels), math.floor if wanted < pixels else math.ceil
    width, height = max(1, rounded(width * scale)), max(1, rounded(height * scale))
    if wanted < pixels:  # where one side is a single pixel already, the other bears it all
        height = max(1, min(height, wanted // width))
        width = max(1, min(width, wanted // height))
    return Image(image.pil.resize((width, height), PILImage.Resampling.BICUBIC))
