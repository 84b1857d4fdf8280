"""Images on disk, once each, under the hash of their PNG bytes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from .errors import DataError
from .messages import Image


class ImageStore:
    """A folder of `<sha256>.png`. Safe for many writers: a file appears under its name only when it is whole."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._known: set[str] = set()

    def put(self, image: Image) -> str:
        """Store an image and return its hash."""
        sha = image.sha256
        if sha not in self._known:
            path = self._path(sha)
            if not path.exists():
                self._write(path, image.png)
            self._known.add(sha)
        return sha

    def get(self, sha: str) -> Image:
        """The image of a hash. Raises DataError when it was never stored or its bytes have changed."""
        try:
            content = self._path(sha).read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"image {sha} is not in {self.folder}") from error
        if hashlib.sha256(content).hexdigest() != sha:
            raise DataError(f"image {sha} in {self.folder} is not what was stored under its name")
        return Image.from_png(content)

    def _path(self, sha: str) -> Path:
        return self.folder / f"{sha}.png"

    def _write(self, path: Path, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
