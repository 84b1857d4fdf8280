"""Whose request it is: a rollout's key, an unguessable secret, opens that rollout's session and nothing else."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from agentrl.policy_ask import SessionEndedError
from agentrl.policy_session import PolicySession
from agentrl.renderer import Renderer
from agentrl.tokens import new_key

from .policy_errors import UnknownKeyError

ENDED_KEPT = 65536
"""Keys of ended rollouts that are remembered, so that a late request learns that it is late."""
Headers = Mapping[bytes, bytes]


class Desk(Protocol):
    """What the policy app asks. `scored` = sessions take rewards and end."""

    model: str
    max_len: int
    renderer: Renderer
    scored: bool

    def admits(self, headers: Headers) -> bool: ...

    def find(self, headers: Headers) -> PolicySession: ...


class RolloutDesk:
    """The sessions of rollouts that run, by key. `token` opens what belongs to no rollout (metrics)."""

    scored = True

    def __init__(self, model: str, max_len: int, renderer: Renderer, token: str | None = None) -> None:
        self.model = model
        self.max_len = max_len
        self.renderer = renderer
        self._token = _digest(token) if token is not None else None
        self._open: dict[bytes, PolicySession] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, session: PolicySession) -> str:
        """The key of a new session."""
        key = new_key()
        self._open[_digest(key)] = session
        return key

    def close(self, key: str) -> None:
        """From now on the key is answered with 410."""
        digest = _digest(key)
        del self._open[digest]
        self._ended[digest] = None
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def admits(self, headers: Headers) -> bool:
        digest = _digest(key_of(headers))
        own = self._token is not None and hmac.compare_digest(digest, self._token)
        return own or digest in self._open or digest in self._ended

    def find(self, headers: Headers) -> PolicySession:
        """Raises UnknownKeyError, SessionEndedError."""
        digest = _digest(key_of(headers))
        if digest in self._open:
            return self._open[digest]
        if digest in self._ended:
            raise SessionEndedError("this rollout has ended")
        raise UnknownKeyError("this key opens no rollout")


class OpenDesk:
    """A policy for use, without rollouts: every request has a session of its own, made by `fresh`."""

    scored = False

    def __init__(
        self, model: str, max_len: int, renderer: Renderer, fresh: Callable[[], PolicySession], token: str | None = None
    ) -> None:
        self.model = model
        self.max_len = max_len
        self.renderer = renderer
        self._fresh = fresh
        self._token = _digest(token) if token is not None else None

    def admits(self, headers: Headers) -> bool:
        """Without a token everybody on this machine may ask, but no web page that a browser has open."""
        if self._token is None:
            return b"origin" not in headers
        return hmac.compare_digest(_digest(key_of(headers)), self._token)

    def find(self, headers: Headers) -> PolicySession:
        return self._fresh()


def key_of(headers: Headers) -> bytes:
    """The key of `Authorization: Bearer` or `x-api-key`; b'' without one."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _digest(key: str | bytes) -> bytes:
    """Keys are looked up by their hash, so that the time it takes tells nothing of them."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
