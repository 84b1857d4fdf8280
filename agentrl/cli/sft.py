"""`agentrl sft`."""

from __future__ import annotations

from ..config import SftConfig
from .supervised import CommandOptions, run_command

DESCRIPTION = (
    "Imitate: supervised fine-tuning on conversations, prompts with answers, recorded trajectories, or plain text. "
    "Every option has a section."
)


class SftCommand(SftConfig, CommandOptions):
    """The configuration with the options of the command."""


def main(argv: list[str]) -> int:
    """The exit code of `agentrl sft ARGV`."""
    return run_command(SftConfig, SftCommand, argv, DESCRIPTION)
