"""`agentrl dpo`."""

from __future__ import annotations

from ..config import DpoConfig
from .supervised import CommandOptions, run_command

DESCRIPTION = "Train a policy on pairs of answers: DPO, IPO, cDPO, with a likelihood term. Every option has a section."


class DpoCommand(DpoConfig, CommandOptions):
    """The configuration with the options of the command."""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl dpo ARGV`."""
    return run_command(DpoConfig, DpoCommand, argv, DESCRIPTION)
