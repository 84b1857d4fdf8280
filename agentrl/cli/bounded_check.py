"""The environment check with a bound in time."""

from __future__ import annotations

import sys
import threading
import traceback

from ..assemble import EnvSource
from ..env_check import Finding, check
from ..errors import ConfigError

SEEDS = (0, 1, 2)


def check_within(source: EnvSource, timeout_s: float) -> list[Finding]:
    """Findings of `check`, on a daemon thread; an env that hangs is a finding that says where.

    Raises ConfigError when the env refuses its options.
    """
    findings: list[Finding] = []
    refused: list[ConfigError] = []
    thread = threading.Thread(target=_check, args=(source, findings, refused), name="env check", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        message = f"It did not come to an end within {timeout_s:g} s{_where(thread)}. Raise --timeout if it is slow."
        return [Finding("error", message)]
    if refused:
        raise refused[0]
    return findings


def _check(source: EnvSource, findings: list[Finding], refused: list[ConfigError]) -> None:
    """The fault boundary of the thread: SystemExit and the like of user code become a finding too."""
    try:
        findings += check(source.make, source.tasks("train"), SEEDS)
    except ConfigError as error:
        refused.append(error)
    except BaseException as error:
        findings.append(Finding("error", f"The check was ended by {type(error).__name__}: {error}."))


def _where(thread: threading.Thread) -> str:
    """', it was at FILE:LINE, in FUNCTION', the innermost line outside of the standard library's own waiting."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    place = next((entry for entry in reversed(stack) if "/lib/python" not in entry.filename), stack[-1])
    return f": it was at {place.filename}:{place.lineno}, in {place.name}"
