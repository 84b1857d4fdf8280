"""`agentrl export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..checkpoint import Checkpoints
from ..errors import ConfigError
from ..model_folder import resolve_model
from .console import out
from .new_folder import new_folder


def main(argv: list[str]) -> int:
    """The exit code of `agentrl export ARGV`. Prints the folder on stdout and nothing else there."""
    options = _parser().parse_args(argv)
    model = None if options.model is None else resolve_model(options.model)
    checkpoint, target = find_checkpoint(Path(options.checkpoint)), new_folder(options.out)
    from transformers.utils import logging

    from agentrl.trainers.checkpoint_export import export_checkpoint

    logging.disable_progress_bar()
    averaged = None if options.weights is None else options.weights == "average"
    with redirect_stdout(sys.stderr):
        export_checkpoint(checkpoint, target, model=model, averaged=averaged)
    out.print(str(target), markup=False, highlight=False, soft_wrap=True)
    return 0


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the latest of a run's folder. Raises ConfigError."""
    if (path / "checkpoints" / "latest").is_file():
        return Checkpoints(path / "checkpoints", keep=1).find("latest")
    if not (path / "run.json").is_file():
        raise ConfigError(f"{path} is neither the folder of a checkpoint nor of a run that has one.")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "agentrl export",
        description="Write the policy of a checkpoint as a Hugging Face folder, LoRA adapters merged.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="runs/NAME/checkpoints/step_000010, or runs/NAME for its latest"
    )
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("--model", metavar="PATH", help="the model the run started from, where it has moved")
    parser.add_argument(
        "--weights", choices=("average", "last"), help="with optim.ema: the averaged weights (default) or the last ones"
    )
    parser.add_argument("--debug", action="store_true", help="show stack traces")
    return parser
