"""The pictures that an agent shows in its requests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable
from concurrent.futures import Executor

from .errors import DataError
from .messages import Image
from .policy_ask import BadAskError

DATA = "data:"


class PolicyPictures:
    """Those of one rollout, each decoded once, however often its conversations repeat it."""

    def __init__(self) -> None:
        self._seen: dict[bytes, Image | DataError] = {}

    async def look(self, data_urls: Iterable[str], threads: Executor) -> None:
        """Decode on a thread, for `find`. The event loop's own threads may all be waiting for this: agents run there."""
        urls = [url for url in data_urls if url.startswith(DATA)]
        if urls:
            loop, known = asyncio.get_running_loop(), frozenset(self._seen)
            self._seen.update(await loop.run_in_executor(threads, _decoded, urls, known))

    def find(self, data_url: str) -> Image:
        """The picture of a data URL. Raises BadAskError."""
        if not data_url.startswith(DATA):
            raise BadAskError("pictures are taken as base64 data URLs; no other address is fetched or opened")
        name = _name(data_url)
        if name not in self._seen:
            self._seen |= _decoded([data_url])
        found = self._seen[name]
        if isinstance(found, DataError):
            raise BadAskError(str(found))
        return found


def _name(data_url: str) -> bytes:
    return hashlib.blake2b(data_url.encode("utf-8", "replace")).digest()


def _decoded(data_urls: Iterable[str], known: Collection[bytes] = ()) -> dict[bytes, Image | DataError]:
    """Pictures that are not known yet by their URLs' names, with pixels and hash; what is wrong with one in its place."""
    found: dict[bytes, Image | DataError] = {}
    for url in data_urls:
        name = _name(url)
        if name not in known and name not in found:
            found[name] = image = Image(url)
            try:
                _ = image.sha256
            except DataError as error:
                found[name] = error
    return found
