"""`agentrl status runs/NAME`: what a run is doing, and what every group in flight waits for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from ..report.status import read_status
from ..rollout.stages import in_words
from .console import out
from .exits import DONE

DESCRIPTION = "Show what a run is doing: its step, and what every group in flight waits for and for how long."


def main(argv: list[str]) -> int:
    """The exit code of `agentrl status ARGV`."""
    run = tyro.cli(_command, args=argv, prog="agentrl status", description=DESCRIPTION)
    for line in describe(read_status(run), time.time()):
        out.print(line, highlight=False, soft_wrap=True, markup=False)
    return DONE


def _command(run: Annotated[Path, tyro.conf.Positional]) -> Path:
    """run: the run's folder."""
    return run


def describe(status: dict[str, Any], now: float) -> list[str]:
    """The status in lines, the group that has waited longest first."""
    ago = f"{now - status['time']:.0f} s ago"
    if status.get("ended"):
        return [f"the run ended {ago}"]
    alive = psutil.pid_exists(status["pid"])
    said = "" if alive else f"; there is no process {status['pid']} on this machine any more"
    lines = [
        f"step {status['step']}, version {status['version']}, written {ago}{said}",
        f"{status['doing']} for {status['seconds']:.0f} s; {len(status['groups'])} groups hold places",
    ]
    return lines + [in_words(group) for group in sorted(status["groups"], key=lambda group: -group["seconds"])]
