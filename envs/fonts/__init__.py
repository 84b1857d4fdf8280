"""The fonts that ship: DejaVu Sans and DejaVu Sans Mono Bold (licence beside them)."""

from __future__ import annotations

from pathlib import Path

FONTS = {"sans": "DejaVuSans.ttf", "mono": "DejaVuSansMono-Bold.ttf"}


def font_path(name: str) -> Path:
    """The file of a bundled font (a key of `FONTS`); any other name is taken as a path of the user's own font."""
    return Path(__file__).with_name(FONTS[name]) if name in FONTS else Path(name).expanduser()
