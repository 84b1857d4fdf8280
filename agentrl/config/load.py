"""Configuration from a file and flags. Flags win; a list on the command line replaces the file's."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError

S = TypeVar("S", bound=BaseModel)


def parse_command(command: type[S], argv: Sequence[str], *, prog: str, description: str) -> S:
    """Read `--config FILE` if it is there, then the other flags over it.

    Raises ConfigError for what the file or a value has wrong; tyro itself reports unknown flags and exits with 2.
    """
    path = _flag_value(argv, "--config")
    stored = read_file(path) if path else {}
    default = validated(command, _without_replaced_lists(command, stored, argv), path)
    try:
        return tyro.cli(command, args=list(argv), default=default, prog=prog, description=description)
    except ValidationError as error:
        raise ConfigError(explain(error, command, None)) from error


def read_file(path: str) -> dict[str, Any]:
    """A TOML or YAML file as nested dicts. No environment variable is expanded."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--config {path}: there is no such file.")
    try:
        text = file.read_text()
        loaded = yaml.safe_load(text) if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold sections of options, not a {type(loaded).__name__}.")
    return loaded


def validated(model: type[S], values: dict[str, Any], source: str | None) -> S:
    """The model of plain values. Raises ConfigError that names every wrong key with the nearest right one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, source)) from error


def explain(error: ValidationError, model: type[BaseModel], source: str | None) -> str:
    """One line a mistake, in the user's terms."""
    lines = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"]]
        name = ".".join(path)
        if detail["type"] == "extra_forbidden":
            lines.append(f"There is no option {name}.{_nearest(path, model)}")
        else:
            lines.append(f"{name} = {detail['input']!r}: {detail['msg']}.")
    return (f"{source}: " if source else "") + " ".join(lines)


def _nearest(path: Sequence[str], model: type[BaseModel]) -> str:
    known = option_names(model)
    wanted = ".".join(path)
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == path[-1]]
    shown = list(dict.fromkeys([*near, *same_end]))[:3]
    return f" Did you mean {' or '.join(shown)}?" if shown else ""


def option_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of every option and section of a model."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += option_names(field.annotation, f"{prefix}{name}.")
    return names


def _flag_value(argv: Sequence[str], flag: str) -> str | None:
    for i, argument in enumerate(argv):
        if argument == flag and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith(flag + "="):
            return argument.partition("=")[2]
    return None


def _without_replaced_lists(model: type[BaseModel], stored: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """The file's values less the lists that a flag gives anew: tyro appends to a default list."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in argv if argument.startswith("--")}
    kept = {}
    for section, values in stored.items():
        if isinstance(values, dict) and section in model.model_fields:
            values = {k: v for k, v in values.items() if not (isinstance(v, list) and given & _flags(section, k))}
        kept[section] = values
    return kept


def _flags(section: str, name: str) -> set[str]:
    dotted = f"--{section}.{name}".replace("_", "-")
    return {dotted, f"--{section}"} if name == "name" else {dotted}
