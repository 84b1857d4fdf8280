"""`agentrl rm`."""

from __future__ import annotations

from ..config import RmConfig
from .supervised import CommandOptions, run_command

DESCRIPTION = "Train a reward model on pairs of answers. Every option has a section."


class RmCommand(RmConfig, CommandOptions):
    """The configuration with the options of the command."""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl rm ARGV`."""
    return run_command(RmConfig, RmCommand, argv, DESCRIPTION)
