"""What can be chosen about screenshot arithmetic, and the levels: named presets of those choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.registry import suggest

from .fonts import FONTS, font_path

OPERATORS = "+-*"
MAX_OPERAND = 9999


@dataclass(frozen=True)
class Settings:
    """All choices of one environment; lengths are pixels.

    `cell` > 0 draws every character centred in its own cell x cell square (a vision patch then holds exactly one
    character); 0 draws a free page. Operands lie in [low, high]. `size` is the number of tasks of a split: their
    expressions repeat when the range holds fewer, the look (jitter, distractors, font "any") does not. `reply_tokens` > 0
    bounds a reply through `info["sampling"]`.
    """

    level: str
    width: int
    height: int
    cell: int
    font: str
    font_size: int
    jitter: int
    distractors: int
    operands: int
    low: int
    high: int
    operators: str
    max_turns: int
    size: int
    reply_tokens: int
    prompt: str


INSTRUCTION = "Work out the expression on the page. Reply with the whole number that belongs in the box, nothing else."

LEVELS = {
    level.level: level
    for level in (
        Settings("tiny", 84, 56, 14, "mono", 15, 0, 0, 3, 0, 9, "+", 3, 1920, 16, ""),
        Settings("easy", 168, 112, 0, "sans", 22, 2, 0, 2, 0, 20, "+-", 3, 8192, 0, INSTRUCTION),
        Settings("medium", 336, 224, 0, "any", 32, 6, 2, 2, 2, 99, "+-*", 3, 16384, 0, INSTRUCTION),
        Settings("full", 448, 448, 0, "any", 36, 14, 6, 3, 2, 99, "+-*", 3, 32768, 0, INSTRUCTION),
    )
}

_BOUNDS = {
    "width": (28, 4096),
    "height": (28, 4096),
    "cell": (0, 256),
    "font_size": (6, 256),
    "jitter": (0, 64),
    "distractors": (0, 8),
    "operands": (2, 4),
    "low": (0, MAX_OPERAND),
    "high": (0, MAX_OPERAND),
    "max_turns": (1, 16),
    "size": (1, 10_000_000),
    "reply_tokens": (0, 65536),
}


def resolve(options: Mapping[str, Any]) -> Settings:
    """The settings of a level with explicit options on top. Raises ConfigError for an unknown name or a bad value."""
    level = options.get("level", "tiny")
    if level not in LEVELS:
        raise ConfigError(
            f"screenshot_math has no level {level!r}.{suggest(str(level), LEVELS)} Known: {', '.join(LEVELS)}."
        )
    known = [field.name for field in fields(Settings)]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"screenshot_math has no option {name!r}.{suggest(name, known)} Known: {', '.join(known)}."
            )
    preset = LEVELS[level]
    settings = replace(preset, **{name: _checked(name, value, preset) for name, value in options.items()})
    _check_together(settings)
    return settings


def _checked(name: str, value: Any, preset: Settings) -> Any:
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"screenshot_math: {name} must be a whole number from {low} to {high}, not {value!r}.")
        return value
    if name == "operators" and isinstance(value, list | tuple):
        value = "".join(map(str, value))
    if not isinstance(value, str):
        raise ConfigError(f"screenshot_math: {name} must be text, not {value!r}.")
    if name == "operators" and (not value or set(value) - set(OPERATORS)):
        raise ConfigError(f"screenshot_math: operators is a selection of {OPERATORS!r}, not {value!r}.")
    return value


def _check_together(settings: Settings) -> None:
    if settings.low > settings.high:
        raise ConfigError(f"screenshot_math: low ({settings.low}) is above high ({settings.high}).")
    if settings.font not in (*FONTS, "any") and not Path(font_path(settings.font)).is_file():
        raise ConfigError(
            f"screenshot_math: font is one of {', '.join(FONTS)}, any, or a font file, not {settings.font!r}."
        )
    if settings.cell:
        columns, rows = settings.width // settings.cell, settings.height // settings.cell
        needed = settings.operands * (len(str(settings.high)) + 1)
        if columns < needed or rows < 4:
            raise ConfigError(
                f"screenshot_math: {settings.width}x{settings.height} gives {columns}x{rows} cells of {settings.cell}"
                f" pixels; these operands need {needed}x4. Enlarge width or height, or set cell=0 for a free page."
            )
