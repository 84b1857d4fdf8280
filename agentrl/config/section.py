"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A typed, documented group of options. Unknown keys are errors; the docstring below a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        frozen=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps = true` is a mistake; to Python True is 1."""
        if isinstance(value, bool) and bool not in _kinds(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("it should not be true or false")
        return value

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        default: dict[str, Any] = type(self)().model_dump()
        return [name for name, value in self.model_dump().items() if value != default[name]]


def _kinds(annotation: Any) -> set[Any]:
    """The types an annotation is made of."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))
