"""A function's signature and docstring as an OpenAI tool schema, and the check of a call's arguments against it.

The first parameter (`self`) is left out. Annotations may be anything pydantic validates; a parameter without one takes
any JSON value. Descriptions come from the docstring (Google style; others that docstring_parser knows work too).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from .registry import suggest

SHOWN_PROBLEMS = 3
_LITERAL_KEYS = frozenset({"default", "const", "enum", "examples"})


class ArgumentsError(ValueError):
    """The arguments of a call do not fit the tool; the message is written for the model."""


@dataclass(frozen=True)
class ToolSchema:
    """One tool. `fields` maps a parameter to its field in `model` (a parameter may be called `json` or `_x`, a field not)."""

    name: str
    description: str
    model: type[BaseModel]
    fields: Mapping[str, str]

    def as_openai(self) -> dict[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`, kept short: no titles."""
        parameters = _without_titles(self.model.model_json_schema(by_alias=True))
        parameters.pop("additionalProperties", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments with defaults filled in and values of the annotated types. Raises ArgumentsError."""
        try:
            parsed = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ArgumentsError(self._explain(error)) from None
        return {name: getattr(parsed, field) for name, field in self.fields.items()}

    def _explain(self, error: ValidationError) -> str:
        problems = []
        for detail in error.errors(include_url=False, include_context=False)[:SHOWN_PROBLEMS]:
            where = ".".join(str(key) for key in detail["loc"])
            if detail["type"] == "missing":
                problems.append(f"{where} is missing")
            elif detail["type"] == "extra_forbidden":
                problems.append(f"there is no {where}.{suggest(where, self.fields)}")
            else:
                problems.append(f"{where}: {detail['msg']}")
        return "; ".join(problems)


def tool_schema(method: Callable[..., Any]) -> ToolSchema:
    """The schema of an unbound method. Raises TypeError when a parameter cannot be given by name or described as JSON."""
    name = method.__name__
    documented = docstring_parser.parse(inspect.getdoc(method) or "")
    about = {entry.arg_name: entry.description or "" for entry in documented.params}
    hints = _hints(method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    fields = {parameter.name: f"field_{i}" for i, parameter in enumerate(parameters)}
    definitions: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: parameter {parameter} cannot be given by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=about.get(parameter.name) or None)
        definitions[fields[parameter.name]] = (hints.get(parameter.name, Any), field)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **definitions)
        schema = ToolSchema(name, (documented.description or "").strip(), model, fields)
        schema.as_openai()
    except PydanticUserError as error:
        raise TypeError(f"tool {name}: its parameters cannot be described as JSON: {error.message}") from error
    return schema


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(method, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"tool {method.__name__}: an annotation is not known where the class is made: {error}"
        ) from error


def _without_titles(schema: Any) -> Any:
    """The schema without pydantic's generated titles. A property called `title` is a dict, and stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _LITERAL_KEYS else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
