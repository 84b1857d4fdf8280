"""What the training programs have in common: sources of data, optimizer, adapters, the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
Theirs = Mapping[str, Any]
"""The value of every option of one of their programs, by its name."""


def listed(text: str | None) -> list[str] | None:
    """What stands between commas."""
    return [word.strip() for word in text.split(",")] if text else None


def numbers(text: str | None) -> list[float] | None:
    """The numbers between commas. Raises ConfigError."""
    try:
        return [float(word) for word in text.split(",")] if text else None
    except ValueError as error:
        raise ConfigError("from-openrlhf: the probabilities of datasets are numbers with commas between.") from error


def model_path(name: str, theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    """The model that is trained, and its type."""
    if theirs["ds.param_dtype"] == "fp16":
        raise ConfigError(
            "from-openrlhf: ds.param_dtype fp16: there is no float16 training here; bfloat16 is model.dtype."
        )
    if not theirs[name]:
        notes.append(f"{name} is not given: name the model with model.path")
    return {"model.path": theirs[name]}


def adapters(theirs: Theirs) -> dict[str, Any]:
    rank, targets = theirs["ds.lora.rank"], theirs["ds.lora.target_modules"]
    return {
        "lora.rank": rank,
        "lora.alpha": theirs["ds.lora.alpha"] if rank else None,
        "lora.dropout": theirs["ds.lora.dropout"] if rank else None,
        "lora.targets": targets if rank and targets != ["all-linear"] else None,
    }


def optimizer(theirs: Theirs, notes: list[str], who: str = "") -> dict[str, Any]:
    """`who` = what their names of the optimizer's options start with."""
    muon = theirs[f"{who}optim"] == "muon"
    if muon:
        notes.append(f"{who}optim muon: whole matrices need parallel.zero_stage 0; optim.lr is that of AdamW")
    return {
        "parallel.zero_stage": 0 if muon else theirs["ds.zero_stage"],
        "parallel.offload_optimizer": theirs["ds.adam_offload"] and not muon,
        "optim.name": "muon" if muon else "adamw",
        "optim.lr": theirs[f"{who}adam.lr"],
        "optim.betas": theirs[f"{who}adam.betas"],
        "optim.eps": theirs[f"{who}adam.eps"],
        "optim.weight_decay": theirs[f"{who}adam.weight_decay"],
        "optim.max_norm": theirs[f"{who}max_norm"],
        **schedule(theirs, who, "optim", "warmup_ratio"),
    }


def schedule(theirs: Theirs, who: str, section: str, warmup: str) -> dict[str, Any]:
    """The learning rate over the run, as options of a section of ours; `warmup` = what its share of warmup is called."""
    name = theirs[f"{who}lr_scheduler"]
    if name not in SCHEDULES:
        raise ConfigError(f"from-openrlhf: {who}lr_scheduler {name}: here it is one of {', '.join(SCHEDULES)}.")
    least = theirs[f"{who}min_lr_ratio"] if name == "cosine_with_min_lr" else None
    ratio = None if name == "constant" else theirs[f"{who}lr_warmup_ratio"]
    return {f"{section}.schedule": SCHEDULES[name], f"{section}.min_lr_ratio": least, f"{section}.{warmup}": ratio}


def folder(theirs: Theirs, notes: list[str]) -> dict[str, Any]:
    """Where the run is, what is kept of it, and where it is logged."""
    output, wandb = Path(theirs["ckpt.output_dir"]), theirs["logger.wandb.key"] is not None
    if theirs["ckpt.load_enable"]:
        notes.append(
            "ckpt.load_enable: a run that has a checkpoint goes on with --resume latest; the first start is without"
        )
    return {
        "run.dir": str(output.parent),
        "run.name": theirs["logger.wandb.run_name"] or output.name,
        "ckpt.every": max(0, theirs["ckpt.save_steps"]),
        "ckpt.keep": theirs["ckpt.max_num"],
        "log.wandb": wandb,
        "log.wandb_project": theirs["logger.wandb.project"] if wandb else None,
        "log.wandb_entity": theirs["logger.wandb.org"] if wandb else None,
        "log.wandb_group": theirs["logger.wandb.group"] if wandb else None,
        "log.tensorboard": theirs["logger.tensorboard_dir"] is not None,
    }
