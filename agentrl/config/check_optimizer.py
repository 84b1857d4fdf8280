"""What optimizer and sharding may not be asked for. Pure functions of the configuration; raise ConfigError."""

from __future__ import annotations

from ..errors import ConfigError
from .supervised import TrainerConfig


def check_optimizer(config: TrainerConfig) -> None:
    """The optimizer and its learning rate, of every kind of training."""
    optim = config.optim
    unread = {
        ("betas", "with --optim.name sgd"): optim.name == "sgd",
        ("eps", "with --optim.name sgd"): optim.name == "sgd",
        ("warmup", "with --optim.warmup-ratio"): optim.warmup_ratio > 0,
        ("min_lr_ratio", "with --optim.schedule constant"): optim.schedule == "constant",
    }
    for (name, why), holds in unread.items():
        if holds and name in optim.changed():
            raise ConfigError(f"--optim.{name.replace('_', '-')} is not used {why}.")
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"--optim.betas {optim.betas[0]:g} {optim.betas[1]:g}: both must be in [0, 1).")


def check_sharding(config: TrainerConfig) -> None:
    """What a ZeRO stage can hold, and what must not be sharded."""
    parallel, stage = config.parallel, config.parallel.zero_stage
    if config.optim.name == "muon" and stage > 0:
        raise ConfigError(
            f"--optim.name muon works on whole matrices, --parallel.zero-stage {stage} cuts them up: use stage 0 or adamw."
        )
    if config.optim.name == "muon" and config.model.dtype == "bfloat16":
        raise ConfigError(
            "--optim.name muon works on whole matrices, and the float32 master weights of --model.dtype bfloat16 are sharded: "
            "use float32 or adamw."
        )
    if parallel.offload_optimizer and stage == 0:
        raise ConfigError("--parallel.offload-optimizer needs --parallel.zero-stage 1, 2 or 3.")
    if parallel.offload_params and stage != 3:
        raise ConfigError(f"--parallel.offload-params needs --parallel.zero-stage 3, not {stage}.")
