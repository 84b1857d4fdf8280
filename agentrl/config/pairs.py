"""KEY=VALUE pairs of options that are handed on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError


def parse_options(pairs: Iterable[str], flag: str) -> dict[str, Any]:
    """KEY=VALUE pairs; each value is read as TOML, else it is a string. Raises ConfigError."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} wants KEY=VALUE, not {pair!r}.")
        options[key.strip()] = _toml_value(value)
    return options


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
