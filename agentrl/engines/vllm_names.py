"""What vLLM knows of names and values, read from its source before anything starts."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ..config import Config
from ..errors import ConfigError
from ..registry import suggest
from .vllm_options import OWN_ARGUMENTS, parse_engine_args
from .vllm_source import engine_arguments, statements
from .vllm_values import value_problem


def check_vllm_names(config: Config) -> None:
    """Every --engine.args name is one of vLLM's that agentrl does not set itself, its value one that vLLM takes there, and the
    tool parser exists.

    Raises ConfigError with the nearest right name or what is taken. Of another engine, and where vLLM is not installed, there
    is nothing to compare with.
    """
    if config.engine.name != "vllm":
        return
    known, parsers = engine_argument_names(), tool_parser_names()
    for name, value in parse_engine_args(config.engine.args).items():
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"--engine.args {name}: {OWN_ARGUMENTS[name]}.")
        if known and name not in known:
            raise ConfigError(f"--engine.args {name}: vLLM's engine has no such argument.{suggest(name, known)}")
        if problem := value_problem(name, value):
            raise ConfigError(f"--engine.args {name}={value}: {problem}")
    parser = config.model.tool_parser
    if parsers and parser not in parsers:
        raise ConfigError(f"--model.tool-parser {parser}: vLLM has no such tool parser.{suggest(parser, parsers)}")


def engine_argument_names() -> list[str]:
    """The fields of vLLM's AsyncEngineArgs."""
    return list(engine_arguments())


def tool_parser_names() -> list[str]:
    """vLLM's tool parsers, and "json", which is agentrl's own."""
    found = [
        key.value
        for table in _tables(statements("vllm.tool_parsers"))
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
