"""`agentrl ckpt universal`: a checkpoint for another number of trainer ranks."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from .console import out
from .export import find_checkpoint
from .new_folder import new_folder


def main(argv: list[str]) -> int:
    """The exit code of `agentrl ckpt ARGV`. Prints the folder on stdout and nothing else there."""
    options = _parser().parse_args(argv)
    checkpoint, target = find_checkpoint(Path(options.checkpoint)), new_folder(options.out)
    from agentrl.trainers.universal import universal_checkpoint

    with redirect_stdout(sys.stderr):
        universal_checkpoint(checkpoint, target)
    out.print(str(target), markup=False, highlight=False, soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "agentrl ckpt", description="What can be done with checkpoints.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    universal = commands.add_parser(
        "universal",
        description="Write a checkpoint in a form that any --parallel.ranks can --resume, with the same ZeRO stage.",
        help="for another number of trainer ranks",
        allow_abbrev=False,
    )
    universal.add_argument(
        "checkpoint", metavar="CKPT", help="runs/NAME/checkpoints/step_000010, or runs/NAME for its latest"
    )
    universal.add_argument("out", metavar="OUT", help="a new folder, for --resume OUT --run.name NAME")
    universal.add_argument("--debug", action="store_true", help="show stack traces")
    return parser
