"""A folder that a command writes and that must not hold anything yet."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError


def new_folder(path: str) -> Path:
    """The folder; it need not exist. Raises ConfigError when something is there."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already: choose a new folder.")
    return folder
