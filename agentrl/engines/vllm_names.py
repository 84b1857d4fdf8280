"""Names that vLLM knows, read from its source: importing it takes ten seconds and half a gigabyte."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..config import Config
from ..errors import ConfigError
from ..registry import suggest
from .vllm_options import OWN_ARGUMENTS, parse_engine_args


def check_vllm_names(config: Config) -> None:
    """Every --engine.args name is one of vLLM's that agentrl does not set itself, and its tool parser exists.

    Raises ConfigError with the nearest right name. Of another engine, and where vLLM is not installed, there is nothing to
    compare with.
    """
    if config.engine.name != "vllm":
        return
    known, parsers = engine_argument_names(), tool_parser_names()
    for name in parse_engine_args(config.engine.args):
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"--engine.args {name}: {OWN_ARGUMENTS[name]}.")
        if known and name not in known:
            raise ConfigError(f"--engine.args {name}: vLLM's engine has no such argument.{suggest(name, known)}")
    parser = config.model.tool_parser
    if parsers and parser not in parsers:
        raise ConfigError(f"--model.tool-parser {parser}: vLLM has no such tool parser.{suggest(parser, parsers)}")


def engine_argument_names() -> list[str]:
    """The fields of vLLM's AsyncEngineArgs."""
    classes = {"EngineArgs", "AsyncEngineArgs"}
    bodies = [
        node.body
        for node in _statements("engine/arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in classes
    ]
    return [
        field.target.id
        for body in bodies
        for field in body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def tool_parser_names() -> list[str]:
    """vLLM's tool parsers, and "json", which is agentrl's own."""
    found = [
        key.value
        for table in _tables(_statements("tool_parsers/__init__.py"))
        for key in table.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]
    return ["json", *found] if found else []


def _tables(statements: Iterable[ast.stmt]) -> Iterator[ast.Dict]:
    """The dicts that are assigned to names that say what is registered."""
    for node in statements:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if any("REGISTER" in name for name in names):
                yield node.value


def _statements(path: str) -> list[ast.stmt]:
    """A module of vLLM's, parsed; nothing where there is none."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders if (file := Path(folder) / path).is_file()]
    return ast.parse(files[0].read_text(encoding="utf-8")).body if files else []
