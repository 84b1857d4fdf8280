"""vLLM's modules as syntax trees: importing them takes ten seconds and half a gigabyte."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

ENGINE_ARGUMENTS = "vllm.engine.arg_utils"
"""The module with the classes below."""
CLASSES = ("EngineArgs", "AsyncEngineArgs")


@functools.cache
def statements(module: str) -> tuple[ast.stmt, ...]:
    """What a module of vLLM's consists of; nothing where there is none."""
    package, *parts = module.split(".")
    if package != "vllm":
        return ()
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in map(Path, folders):
        place = folder.joinpath(*parts)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return tuple(ast.parse(file.read_text(encoding="utf-8")).body)
    return ()


@functools.cache
def engine_arguments() -> dict[str, ast.AnnAssign]:
    """The fields of vLLM's AsyncEngineArgs by name, with their types and defaults."""
    classes = [found for name in CLASSES if (found := definition(ENGINE_ARGUMENTS, name)[1]) is not None]
    return {
        name: field for found in classes if isinstance(found, ast.ClassDef) for name, field in fields(found).items()
    }


def fields(found: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    """The annotated fields of a class."""
    return {
        field.target.id: field
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.expr | None]:
    """(the module in which a name is defined, the class or the value that it is), through what modules import from each other;
    None where that cannot be seen.
    """
    for node in statements(module):
        match node:
            case ast.ClassDef(name=found) if found == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return module, node.value
            case ast.ImportFrom(module=str(source), names=aliases):
                for alias in aliases:
                    if (alias.asname or alias.name) == name:
                        return definition(source, alias.name)
    return module, None
