"""Numbers as files of OpenRLHF's format give them: tensors, arrays, lists of one, plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import EnvError
from ..step_info import finite


def number(value: Any, what: str) -> float | None:
    """The one number of a value; None for None, NaN and inf. Raises EnvError where there are more, or none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple):
        if len(value) != 1:
            raise EnvError(f"{what} must hold one number for one episode, not {len(value)}")
        value = value[0]
    return None if value is None else finite(what, value)


def logs(extra_logs: Any) -> dict[str, float]:
    """`extra_logs` as metrics: name to number."""
    if not extra_logs:
        return {}
    if not isinstance(extra_logs, Mapping):
        raise EnvError(f"extra_logs must be a dict of numbers, not {type(extra_logs).__name__}")
    found = {str(name): number(value, f"extra_logs[{name!r}]") for name, value in extra_logs.items()}
    return {name: value for name, value in found.items() if value is not None}
