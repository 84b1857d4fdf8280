"""Checkpoints that any number of ranks can load: DeepSpeed's universal form, in which weights and optimizer state lie whole."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from ..errors import ConfigError
from .checkpoint import TAG, UNIVERSAL, About
from .critic import TAG as CRITIC


def universal_checkpoint(folder: Path, out: Path) -> None:
    """Write the checkpoint in `folder` once more, in a form for any number of ranks of the same ZeRO stage; random states
    are left out, so what is drawn at random after it (LoRA's dropout) is drawn anew. Raises ConfigError, DataError.
    """
    about = About.read(folder)
    if (folder / TAG / UNIVERSAL).is_file():
        raise ConfigError(f"{folder} is one for any number of ranks already.")
    if about.stage == 3:
        raise ConfigError(f"{folder} is of ZeRO stage 3: checkpoints of stages 0 to 2 can be written for other ranks.")
    shutil.copytree(folder, out, dirs_exist_ok=True)
    for part in (TAG, CRITIC):
        if (folder / part).is_dir() and about.stage:
            shutil.rmtree(out / part)
            _convert(folder / part, out / part)
    for name in ("policy.json", "ema_rank_0.pt"):
        if (folder / TAG / name).is_file():
            shutil.copyfile(folder / TAG / name, out / TAG / name)
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
