"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A typed, documented group of options. Unknown keys are errors; the docstring below a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        frozen=True,
        allow_inf_nan=False,
    )

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        default: dict[str, Any] = type(self)().model_dump()
        return [name for name, value in self.model_dump().items() if value != default[name]]
