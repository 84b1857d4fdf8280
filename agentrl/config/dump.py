"""The configuration as TOML, complete and without secrets: feeding it back gives the same configuration."""

from __future__ import annotations

import json
import math
from typing import Any

from .section import Section


def to_toml(section: Section) -> str:
    """Every option that has a value, section by section."""
    return as_toml(section.model_dump())


def as_toml(values: dict[str, Any]) -> str:
    """Nested sections of options; those without a value are left out."""
    lines: list[str] = []
    _write(values, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(values: dict[str, Any], prefix: str, lines: list[str]) -> None:
    plain = {name: value for name, value in values.items() if not isinstance(value, dict) and value is not None}
    if prefix and plain:
        lines += ["", f"[{prefix}]"]
    lines += [f"{name} = {_toml(value)}" for name, value in plain.items()]
    for name, value in values.items():
        if isinstance(value, dict):
            _write(value, f"{prefix}.{name}" if prefix else name, lines)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON's strings are TOML's but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
