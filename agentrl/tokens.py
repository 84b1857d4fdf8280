"""Bearer tokens and keys: read where they are needed, never part of a configuration, a log or an error."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from .errors import ConfigError

KEY_PREFIX = "sk-rollout-"
_KEY = re.compile(f"{KEY_PREFIX}[\\w-]+")


def new_key() -> str:
    """A key that opens one rollout; 256 random bits."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"


def without_keys(text: str) -> str:
    """A text of somebody else's, an error of an agent say, with every rollout's key in it made unreadable."""
    return _KEY.sub(f"{KEY_PREFIX}…", text)


def read_token(path: str | None, flag: str) -> str | None:
    """The one word in a token file; None without a file. Raises ConfigError that names the flag, never the content."""
    if path is None:
        return None
    try:
        words = Path(path).expanduser().read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {type(error).__name__}, it must be a text file with the token.") from None
    if len(words) != 1 or not words[0].isascii():
        raise ConfigError(f"{flag} {path} must hold one token and nothing else, in ASCII.")
    return words[0]
