"""`agentrl init`: agentrl's own tiny policies, as ordinary Hugging Face folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError
from .console import err, out
from .new_folder import new_folder
from .policy import making, tiny_policy


def main(argv: list[str]) -> int:
    """The exit code of `agentrl init ARGV`. Prints the folder on stdout and nothing else there."""
    options = _parser().parse_args(argv)
    from agentrl.trainers.tiny import make_tiny, tiny_path

    if options.untrained and options.out is None:
        raise ConfigError("--untrained needs --out DIR: the policy in the cache is one that has learned something.")
    if options.out is not None:
        folder = new_folder(options.out)
        with making() as bar:
            make_tiny(options.kind, folder, progress=bar, max_steps=0 if options.untrained else None)
    else:
        if (tiny_path(options.kind) / "config.json").is_file():
            err.print("in the cache already")
        folder = Path(tiny_policy(options.kind))
    out.print(str(folder), markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "agentrl init",
        description="Make a policy of half a million parameters: a minute or two on one core.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "kind", metavar="tiny-vlm | tiny-text", help="for environments with pictures, or with text alone"
    )
    parser.add_argument("--out", metavar="DIR", help="a new folder; without it the policy is kept in the user's cache")
    parser.add_argument("--untrained", action="store_true", help="skip the warm start: random weights, for agentrl sft")
    parser.add_argument("--debug", action="store_true", help="show stack traces")
    return parser
