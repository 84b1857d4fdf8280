"""Records hold numbers that can be drawn and that JSON has a form for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

COUNT = "not_finite"


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without numbers that are NaN or infinite; `not_finite` = how many those were, where there were any."""
    kept = {key: value for key, value in record.items() if not isinstance(value, float) or math.isfinite(value)}
    left_out = len(record) - len(kept)
    return {**kept, COUNT: kept.get(COUNT, 0.0) + left_out} if left_out else kept
