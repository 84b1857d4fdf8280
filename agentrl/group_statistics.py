"""What a group's scores say: whether they carry a signal, and how often k attempts pass. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable


def keep_group(scores: Iterable[float | None], low: float | None = None, high: float | None = None) -> bool:
    """True iff the members with a verdict, at least two, differ in raw score and low < their mean < high.

    scores: one per rollout of the group; None or NaN = no verdict. A bound that is None is not tested. The group is
    kept or dropped whole (dynamic sampling, DAPO, Yu 2025).
    """
    known = [float(score) for score in scores if score is not None and not math.isnan(score)]
    if len(known) < 2 or max(known) - min(known) <= 0:
        return False
    mean = math.fsum(known) / len(known)
    return (low is None or low < mean) and (high is None or mean < high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the unbiased estimate from n attempts of which c passed (Chen 2021).

    Over prompts, take the mean of the per-prompt values. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
