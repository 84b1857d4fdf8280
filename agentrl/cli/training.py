"""What `train`, `sft`, `rm` and `dpo` have in common: the run's folder, where it is shown and logged, and how it goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import Checkpoints
from ..config import Config, SupervisedConfig
from ..config.dump import to_toml
from ..config.load import read_file, validated
from ..config.resumed import check_kind, check_resumed
from ..errors import ConfigError
from ..report import tensorboard, weights_and_biases
from ..report.progress import SHOWN, Reporters, Shown, make_reporter
from ..report.run_folder import RunFolder
from ..report.weights_and_biases import WandbRun

AnyConfig = Config | SupervisedConfig


def run_folder(config: AnyConfig, what: str, how: str) -> tuple[RunFolder, Path | None]:
    """The run's folder, without --run.name called after what it learns, how and when; and the checkpoint it goes on from.
    Nothing is written yet. Raises ConfigError, also for a resumed run that would be another one.
    """
    run = config.run
    if run.resume is None:
        what = re.sub(r"[^A-Za-z0-9]+", "-", what).strip("-")
        return RunFolder.fresh(run.dir, run.name or f"{what}-{how}-{time.strftime('%m%d-%H%M%S')}"), None
    if run.name is None:
        raise ConfigError("--resume needs --run.name, the name of the run to go on with.")
    folder = RunFolder(Path(run.dir) / run.name)
    checkpoint = Checkpoints(folder.checkpoints, config.ckpt.keep).find(run.resume)
    file = str(folder.path / "config.toml")
    stored = read_file(file)
    check_kind(config.kind, stored, str(folder.path))
    check_resumed(config, validated(type(config), stored, file))
    return folder, checkpoint


@contextmanager
def begun(folder: RunFolder, config: AnyConfig, resume_from: Path | None) -> Iterator[None]:
    """The folder, locked, with the configuration that reproduces the run from its start. Where it goes on, checkpoints and then
    records are those of the step at which it does.
    """
    as_begun = config.model_copy(update={"run": config.run.model_copy(update={"resume": None})})
    with folder.locked():
        step = None
        if resume_from is not None:
            step = Checkpoints(folder.checkpoints, config.ckpt.keep).go_on_from(resume_from).step
        folder.begin(to_toml(as_begun), step)
        yield


def check_sinks(config: AnyConfig) -> None:
    """The packages that the log options need are there."""
    if config.log.tensorboard:
        tensorboard.check_installed()
    if config.log.wandb:
        weights_and_biases.check_installed()


def reporter_of(config: AnyConfig, folder: RunFolder, steps: int | None, shown: Shown = SHOWN) -> Reporters:
    """Where a run is shown and logged, as --log says."""
    log, path = config.log, folder.path
    wandb = WandbRun(path, log.wandb_project, log.wandb_entity, log.wandb_group, config.model_dump(mode="json"))
    return make_reporter(
        log.progress,
        steps,
        tensorboard=path / "tensorboard" if log.tensorboard else None,
        wandb=wandb if log.wandb else None,
        shown=shown,
    )


def interrupted_lines(folder: RunFolder, kind: str) -> list[str]:
    """What is said of a run that was interrupted, and how it goes on."""
    path = folder.path
    saved = (folder.checkpoints / "latest").is_file()
    resume = f"agentrl {kind} --resume latest --run.dir {path.parent} --run.name {path.name}"
    return [f"Interrupted: {path}", f"Go on with: {resume}" if saved else "There is no checkpoint to go on from."]
