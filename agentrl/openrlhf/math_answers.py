"""What reward files import from `openrlhf.utils` to judge mathematical answers, with that module's names and calls."""

from __future__ import annotations

import re
from typing import Any

BOX = "\\boxed{"
NO_MATTER = re.compile(r"\\left|\\right|\\[!,;: ]|\\text\s*(?=\{)|\\[dt](?=frac)|[\s${}]|\\(?=[%$])|[.]$")
"""Spelling that changes no answer: sizes, spaces, text commands, display fractions, braces, dollars, a full stop."""
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
WILD_POWER = re.compile(r"\^\s*\{?\s*\(?\s*-?\d{3,}|\^[^+*/=-]*\^|\*\*|!")
LONGEST = 300
"""Characters of an answer that is computed with: powers of powers and longer ones are compared as text alone."""


def extract_boxed_answer(solution: str) -> str | None:
    """What stands in the last `\\boxed{…}`, braces inside balanced; None where there is none that is closed."""
    start = solution.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(BOX), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if not depth:
            return solution[start + len(BOX) : end]
    return None


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """Whether two answers are equal, as text but for spelling, or in value as math-verify sees it."""
    if given_answer is None or ground_truth is None:
        return False
    given, truth = str(given_answer).strip(), str(ground_truth).strip()
    if not given or not truth:
        return False
    if _plain(given) == _plain(truth):
        return True
    return not (_wild(given) or _wild(truth)) and _equal(given, truth)


def _plain(answer: str) -> str:
    return NO_MATTER.sub("", THOUSANDS.sub("", answer)).lower()


def _wild(answer: str) -> bool:
    return len(answer) > LONGEST or WILD_POWER.search(answer) is not None


def _equal(given: str, truth: str) -> bool:
    """Without math-verify's own time limits, which are signals and need the main thread."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("grade_answer needs math-verify: pip install 'agentrl[math]'") from error
    gold, found = (
        parse(f"{BOX}{THOUSANDS.sub('', text)}}}", parsing_timeout=None, raise_on_error=False)
        for text in (truth, given)
    )
    return bool(verify(gold, found, timeout_seconds=None, raise_on_error=False))
