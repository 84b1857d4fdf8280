"""`agentrl doctor`: what this machine can run, and what is missing for a training run."""

from __future__ import annotations

import argparse

from . import machine, stack
from .console import out, progress_bar
from .findings import Finding

MARKS = {"ok": "[green]ok     [/]", "note": "[yellow]note   [/]", "missing": "[red]missing[/]"}


def main(argv: list[str]) -> int:
    """The exit code of `agentrl doctor ARGV`: 1 when a training run cannot work here."""
    parser = argparse.ArgumentParser("agentrl doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=120.0, help="longest import of one package, in seconds")
    parser.add_argument("--debug", action="store_true", help="show stack traces")
    options = parser.parse_args(argv)
    findings = [*machine.findings(), *stack.versions()]
    for finding in findings:
        show(finding)
    with progress_bar() as bar:
        for i, name in enumerate(stack.IMPORTED):
            bar(f"importing {name}", i / len(stack.IMPORTED))
            found = stack.imports(name, options.timeout)
            findings += found
            for finding in found:
                show(finding)
    missing = [finding for finding in findings if finding.level == "missing"]
    if missing:
        out.print(f"A training run cannot work here yet: {len(missing)} things are missing.")
    else:
        out.print("A training run can work here. Try: agentrl train --env screenshot_math")
    return int(bool(missing))


def show(finding: Finding) -> None:
    """One line: how it is, what it is, and what to do."""
    out.print(MARKS[finding.level], end=" ")
    out.print(finding.what + (f" - {finding.todo}" if finding.todo else ""), markup=False)
