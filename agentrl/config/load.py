"""Configuration from a file and flags. Flags win; a list on the command line replaces the file's."""

from __future__ import annotations

import difflib
import io
import re
import sys
import tomllib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from .resumed import check_kind

S = TypeVar("S", bound=BaseModel)


def parse_command(command: type[S], argv: Sequence[str], *, prog: str, description: str) -> S:
    """Read `--config FILE` if it is there, then the other flags over it.

    Raises ConfigError for what the file or a value has wrong; tyro itself reports unknown flags and exits with 2.
    """
    argv = repeat_flags(argv, repeatable_flags(command))
    path = _flag_value(argv, "--config")
    stored = read_file(path) if path else {}
    default = validated(command, _without_replaced_lists(command, stored, argv), path)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(command, args=argv, default=default, prog=prog, description=description)
    except SystemExit as leaving:
        refused = _refused_value(leaving)
        if refused is not None:
            raise ConfigError(explain(refused, command, None)) from refused
        sys.stderr.write(said.getvalue())
        raise


def with_stored_config(argv: Sequence[str], kind: str) -> list[str]:
    """For --resume without --config: the run's own config.toml as the file, and its name where the checkpoint's path was
    given. Flags still win. Raises ConfigError when there is no such run, or it is none of `agentrl KIND`.
    """
    resume = _flag_value(argv, "--resume") or _flag_value(argv, "--run.resume")
    if resume is None or _flag_value(argv, "--config") is not None:
        return list(argv)
    given = list(argv)
    name, parent = _flag_value(argv, "--run.name"), _flag_value(argv, "--run.dir") or "runs"
    if resume != "latest" and name is None:
        owner = Path(resume).resolve().parent.parent
        given += ["--run.dir", str(owner.parent), "--run.name", owner.name]
        name, parent = owner.name, str(owner.parent)
    run = Path(parent) / (name or "")
    if name is not None and not run.is_dir():
        raise ConfigError(f"--resume {resume}: there is no run {run}.")
    stored = run / "config.toml"
    if not stored.is_file():
        return given
    check_kind(kind, read_file(str(stored)), str(run))
    return [*given, "--config", str(stored)]


def _refused_value(leaving: BaseException) -> ValidationError | None:
    """What a section had against its values: tyro shows pydantic's own words for it and exits."""
    error: BaseException | None = leaving
    while error is not None and not isinstance(error, ValidationError):
        error = error.__context__
    return error


def read_file(path: str, flag: str = "--config") -> dict[str, Any]:
    """A TOML or YAML file as nested dicts, `-` in keys as `_`; a section without content is an empty one. No environment
    variable is expanded.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{flag} {path}: there is no such file.")
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{flag} {path}: a configuration is a .toml, .yaml or .yml file.")
    try:
        text = file.read_text(encoding="utf-8-sig")
        loaded = yaml.load(text, _Once) if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{flag} {path} must hold sections of options, not a {type(loaded).__name__}.")
    content = _with_underscores(loaded, f"{flag} {path}")
    return {name: {} if value is None else value for name, value in content.items()}


class _Once(yaml.SafeLoader):
    """YAML in which no key stands twice, as in TOML: PyYAML itself takes the last of them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _with_underscores(values: dict[Any, Any], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ConfigError(f"{source}: {name} stands there twice, once as {key}.")
        found[name] = _with_underscores(value, source) if isinstance(value, dict) else value
    return found


def validated(model: type[S], values: dict[str, Any], source: str | None) -> S:
    """The model of plain values. Raises ConfigError that names every wrong key with the nearest right one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, source)) from error


def explain(error: ValidationError, model: type[BaseModel], source: str | None) -> str:
    """One sentence a mistake, in the user's terms. `error` may be of the model or of one of its sections."""
    prefix = next((name for name, section in sections(model) if section.__name__ == error.title), "")
    lines = []
    for detail in error.errors():
        # Of a union, pydantic adds the alternative that was tried: literal['auto'].
        path = [*filter(None, prefix.split(".")), *(str(part) for part in detail["loc"] if "[" not in str(part))]
        name = ".".join(path)
        if detail["type"] == "extra_forbidden":
            lines.append(_unknown(name, model))
            continue
        shown = f"{name} = {detail['input']!r}" if source else f"--{name.replace('_', '-')} {detail['input']}"
        lines.append(f"{shown}: {_plainly(detail['msg'])}.")
    return (f"{source}: " if source else "") + " ".join(dict.fromkeys(lines))


def _plainly(message: str) -> str:
    said = message.removeprefix("Value error, ").replace("Input should", "it should")
    return re.sub(r"a valid dictionary or instance of \w+", "a section with options", said)


def _unknown(name: str, model: type[BaseModel]) -> str:
    """An option that is there can only have been a key with dots in it."""
    if name in option_names(model):
        section, _, key = name.rpartition(".")
        return f"{name} is no key: {key} stands in the section {section}."
    return f"There is no option {name}.{_nearest(name, model)}"


def _nearest(wanted: str, model: type[BaseModel]) -> str:
    """Names of the same depth that are near, then options of that very name elsewhere."""
    known = option_names(model)
    peers = [name for name in known if name.count(".") == wanted.count(".")]
    near = difflib.get_close_matches(wanted, peers, n=2, cutoff=0.6)
    same_end = [name for name in known if name.rpartition(".")[2] == wanted.rpartition(".")[2]]
    shown = list(dict.fromkeys([*near, *same_end]))[:3]
    return f" Did you mean {' or '.join(shown)}?" if shown else ""


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of every section, nested ones after their parent."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield prefix + name, field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")


def option_names(model: type[BaseModel]) -> list[str]:
    """Dotted names of every option and section of a model."""
    return [
        *model.model_fields,
        *(f"{name}.{key}" for name, section in sections(model) for key in section.model_fields),
    ]


def repeatable_flags(model: type[BaseModel]) -> set[str]:
    """The flags that are given once a value, with their short forms."""
    return {
        flag
        for prefix, section in sections(model)
        for name, field in section.model_fields.items()
        if tyro.conf.UseAppendAction in field.metadata
        for flag in _flags(prefix, name)
    }


def repeat_flags(argv: Sequence[str], repeatable: set[str]) -> list[str]:
    """`--env.opt a=1 b=2` as `--env.opt a=1 --env.opt b=2`, for the flags in `repeatable`."""
    spread: list[str] = []
    flag: str | None = None
    given = False
    for argument in argv:
        if argument.startswith("-"):
            flag = argument if argument.replace("_", "-") in repeatable else None
            given = False
        elif flag is not None:
            spread += [flag] if given else []
            given = True
        spread.append(argument)
    return spread


def _flag_value(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag's last occurrence, which is the one that counts."""
    value = None
    for argument, following in zip(argv, [*argv, None][1:], strict=True):
        if argument == flag:
            value = following
        elif argument.startswith(flag + "="):
            value = argument.partition("=")[2]
    return value


def _without_replaced_lists(model: type[BaseModel], stored: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """The file's values less the lists, and single names in their place, that a flag gives anew: tyro appends to a default
    list.
    """
    given = {argument.partition("=")[0].replace("_", "-") for argument in argv if argument.startswith("--")}
    kept = {}
    for section, values in stored.items():
        if isinstance(values, dict) and section in model.model_fields:
            values = {k: v for k, v in values.items() if not (isinstance(v, list | str) and given & _flags(section, k))}
        kept[section] = values
    return kept


def _flags(section: str, name: str) -> set[str]:
    dotted = f"--{section}.{name}".replace("_", "-")
    return {dotted, f"--{section}"} if name == "name" else {dotted}
