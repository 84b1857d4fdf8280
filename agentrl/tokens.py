"""Bearer tokens: read from a file where they are needed, never part of a configuration, a log or an error."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


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
