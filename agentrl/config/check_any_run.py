"""What runs of every kind may not ask for. Pure functions of the configuration; raise ConfigError."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from ..errors import ConfigError
from .config import Config
from .how import LoraSection, WatchdogSection
from .supervised import SupervisedConfig


def check_any_run(config: Config | SupervisedConfig) -> None:
    """Optimizer, sharding, adapters, logging and watchdog."""
    _check_optimizer(config)
    _check_sharding(config)
    _check_adapters(config.lora)
    _check_log(config)
    _check_watchdog(config.watchdog)


def _check_optimizer(config: Config | SupervisedConfig) -> None:
    """The optimizer and its learning rate, of every kind of training."""
    optim = config.optim
    unread = {
        ("optim", ("betas", "eps"), "with --optim.name sgd"): optim.name == "sgd",
        ("optim", ("warmup",), "with --optim.warmup-ratio"): optim.warmup_ratio > 0,
        ("optim", ("min_lr_ratio",), "with --optim.schedule constant"): optim.schedule == "constant",
    }
    refuse_unread(config, unread)
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"--optim.betas {optim.betas[0]:g} {optim.betas[1]:g}: both must be in [0, 1).")


def _check_sharding(config: Config | SupervisedConfig) -> None:
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


def _check_adapters(lora: LoraSection) -> None:
    unread = ("rank", "alpha", "targets") if lora.path is not None else ("alpha", "dropout", "targets")
    why = "with --lora.path, whose adapter brings its own" if lora.path is not None else "without --lora.rank"
    for name in unread:
        if name in lora.changed() and (lora.path is not None or not lora.enabled):
            raise ConfigError(f"--lora.{name} is not used {why}.")


def _check_log(config: Config | SupervisedConfig) -> None:
    names = ("wandb_project", "wandb_entity", "wandb_group")
    refuse_unread(config, {("log", names, "without --log.wandb"): not config.log.wandb})


def _check_watchdog(watchdog: WatchdogSection) -> None:
    if "warn_after" in watchdog.changed() and watchdog.warn_after >= watchdog.fail_after:
        raise ConfigError(
            f"--watchdog.warn-after {watchdog.warn_after:g} must be below --watchdog.fail-after {watchdog.fail_after:g}: what is "
            "awaited is named before it fails."
        )


def refuse_unread(config: Config | SupervisedConfig, unread: Mapping[tuple[str, tuple[str, ...], str], bool]) -> None:
    """Raises for an option that was given where nothing reads it: (section, options, why) where it holds."""
    for (section, options, why), holds in unread.items():
        given = operator.attrgetter(section)(config).changed() if holds else []
        for name in options:
            if name in given:
                raise ConfigError(f"--{section}.{name.replace('_', '-')} is not used {why}.")
