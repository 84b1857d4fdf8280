"""The values that vLLM's engine arguments take, by the types and bounds that its source gives them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..registry import suggest
from .vllm_source import ENGINE_ARGUMENTS, definition, engine_arguments, fields

TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool) or value in (0, 1)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "str": ("a text (in quotes where it could be a number)", lambda value: isinstance(value, str)),
    "list": ("a list, as in [1, 2]", lambda value: isinstance(value, list)),
    "set": ("a list, as in [1, 2]", lambda value: isinstance(value, list)),
    "dict": ("a table, as in {a = 1}", lambda value: isinstance(value, dict)),
}
"""Type -> (what it is called, whether a value is of it)."""
BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}


@dataclass(frozen=True)
class Takes:
    """What an argument takes: values of these types, or one of these choices; numbers within the bounds."""

    types: tuple[str, ...]
    choices: tuple[Any, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()

    def __contains__(self, value: Any) -> bool:
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return True
        if not any(TYPES[name][1](value) for name in self.types):
            return False
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return not number or all(BOUNDS[name][1](value, bound) for name, bound in self.bounds)

    def __str__(self) -> str:
        words = list(dict.fromkeys(TYPES[name][0] for name in self.types))
        if self.choices:
            words.append(f"one of {', '.join(map(str, self.choices))}")
        within = " and ".join(f"{BOUNDS[name][0]} {bound:g}" for name, bound in self.bounds)
        return " or ".join(words) + (f" {within}" if within else "")


def value_problem(name: str, value: Any) -> str | None:
    """Why vLLM would refuse a value for one of its engine's arguments; None for one that it takes, or of which that cannot be
    seen.
    """
    takes = engine_argument_takes(name)
    if takes is None or value in takes:
        return None
    near = suggest(value, [str(choice) for choice in takes.choices]) if isinstance(value, str) else ""
    return f"vLLM takes {takes}.{near}"


def engine_argument_takes(name: str) -> Takes | None:
    """None where the source does not say it in plain types."""
    field = engine_arguments().get(name)
    alternatives = None if field is None else _alternatives(field.annotation, ENGINE_ARGUMENTS)
    if field is None or alternatives is None:
        return None
    types = tuple(found for found in alternatives if isinstance(found, str))
    choices = tuple(found.value for found in alternatives if isinstance(found, ast.Constant))
    return Takes(types, choices, _bounds(field.value))


def _alternatives(node: ast.expr, module: str) -> Sequence[str | ast.Constant] | None:
    """The types (names of TYPES) and constants that a type is made of; None where one of them is something else."""
    match node:
        case ast.Constant(value=None):
            return []
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _all([left, right], module)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inside):
            return _literals(inside, module)
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name) if name in TYPES:
            return [name]
        case ast.Name(id=name):
            place, found = definition(module, name)
            return _alternatives(found, place) if isinstance(found, ast.expr) else None
    return None


def _all(nodes: Sequence[ast.expr], module: str) -> Sequence[str | ast.Constant] | None:
    found = [_alternatives(node, module) for node in nodes]
    return None if None in found else [one for some in found for one in some or ()]


def _literals(inside: ast.expr, module: str) -> Sequence[str | ast.Constant] | None:
    """What stands in the brackets of a Literal: constants, or names of other Literals."""
    found: list[str | ast.Constant] = []
    for one in inside.elts if isinstance(inside, ast.Tuple) else [inside]:
        some = [one] if isinstance(one, ast.Constant) else _alternatives(one, module)
        if some is None:
            return None
        found += some
    return found


def _bounds(default: ast.expr | None) -> tuple[tuple[str, float], ...]:
    """Those of the option of vLLM's configuration that a default is taken from: `CacheConfig.x`, `get_field(CacheConfig,
    "x")`.
    """
    match default:
        case ast.Attribute(value=ast.Name(id=owner), attr=option):
            pass
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(value=str(option))]):
            pass
        case _:
            return ()
    _, found = definition(ENGINE_ARGUMENTS, owner)
    field = fields(found).get(option) if isinstance(found, ast.ClassDef) else None
    given = field.value.keywords if field is not None and isinstance(field.value, ast.Call) else []
    return tuple(
        (str(keyword.arg), float(ast.literal_eval(keyword.value)))
        for keyword in given
        if keyword.arg in BOUNDS and _is_number(keyword.value)
    )


def _is_number(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int | float)
