"""Checkpoints that any number of ranks can load: DeepSpeed's universal form, in which weights and optimizer state lie whole."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from ..errors import ConfigError
from .checkpoint import TAG, UNIVERSAL, About
from .critic import TAG as CRITIC
from .ema import join_average


def universal_checkpoint(folder: Path, out: Path) -> None:
    """Write the checkpoint in `folder` once more, in a form for any number of ranks of the same ZeRO stage; random states
    are left out, so what is drawn at random after it (LoRA's dropout) is drawn anew. `out` goes when it cannot be done.
    Raises ConfigError, DataError.
    """
    about = About.read(folder)
    if (folder / TAG / UNIVERSAL).is_file():
        raise ConfigError(f"{folder} is one for any number of ranks already.")
    try:
        _write(folder, out, about.stage)
    except KeyError as error:
        shutil.rmtree(out)
        raise ConfigError(
            f"{folder} cannot be written for other ranks: DeepSpeed converts the state of --optim.name adamw alone, and "
            f"finds no {error} in this one."
        ) from error


def _write(folder: Path, out: Path, stage: int) -> None:
    shutil.copytree(folder, out, dirs_exist_ok=True)
    for part in (TAG, CRITIC):
        if (folder / part).is_dir() and stage:
            shutil.rmtree(out / part)
            _convert(folder / part, out / part)
    shutil.copyfile(folder / TAG / "policy.json", out / TAG / "policy.json")
    join_average(folder / TAG, out / TAG)
    for file in (out / TAG).glob("random_rank_*.pt"):
        file.unlink()
    (out / TAG / UNIVERSAL).touch()


def _convert(folder: Path, out: Path) -> None:
    """DeepSpeed's own conversion."""
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        Namespace(
            input_folder=str(folder),
            output_folder=str(out),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    (out.parent / "latest_universal").unlink(missing_ok=True)
