"""Arithmetic on text a model wrote, by walking the syntax tree: no names, no calls, bounded in length, depth and size."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

Number = int | float

MAX_LENGTH = 200
MAX_DEPTH = 40
MAX_BITS = 4096

_ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})


class ExpressionError(ValueError):
    """The text is no arithmetic, or too large; the message is written for the model."""


def evaluate(expression: str) -> Number:
    """The value of `+ - * / // % **` over numbers and parentheses; `^`, `×`, `÷` are understood.

    Takes at most MAX_LENGTH characters and gives integers of at most MAX_BITS bits, so it always ends at once.
    Raises ExpressionError.
    """
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters")
    text = expression.translate(_SPELLINGS).strip()
    if not text or not _ALLOWED.fullmatch(text):
        raise ExpressionError("use only numbers, + - * / // % ** and parentheses")
    try:
        value = _value(ast.parse(text, mode="eval").body, MAX_DEPTH)
    except (SyntaxError, RecursionError, MemoryError):
        raise ExpressionError("this is not a valid expression") from None
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("the result is too large") from None
    return value


def written(value: Number) -> str:
    """The value as digits: a whole float without its `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH}")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand, depth - 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, depth - 1), _value(node.right, depth - 1)
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ExpressionError("use only numbers, + - * / // % ** and parentheses")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError
    return base**exponent


def _bounded(value: object) -> Number:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, complex):
        raise ExpressionError("the result is not a real number")
    raise OverflowError


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
