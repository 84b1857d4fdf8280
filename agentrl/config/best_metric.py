"""Which metric makes a checkpoint the best, and whether an evaluation of the run measures it."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConfigError
from ..registry import suggest
from .config import Config


def check_best_by(config: Config) -> None:
    """`ckpt.best_by` is "none" or in every evaluation of the run. Raises ConfigError with the nearest, or with all."""
    wanted = config.ckpt.best_by
    if wanted is None:
        return
    if config.data.path and not config.data.test_path:
        raise ConfigError("--ckpt.best-by is not used without --data.test-path: nothing is evaluated.")
    known = [f"eval/{name}" for name in measured(config)]
    if wanted in ("none", *known):
        return
    near = suggest(wanted, known)
    of_n = f" pass@k is measured for 1 and --eval.n {config.eval.n}." if "pass@" in wanted else ""
    said = near if near and not of_n else f"{near} Measured: {', '.join(known)}."
    raise ConfigError(f"--ckpt.best-by {wanted}: no evaluation of this run measures it.{of_n}{said}")


def measured(config: Config) -> Iterator[str]:
    """What an evaluation of a training run measures, without eval/: of all, of each environment and of each dataset."""
    ks = sorted({1, config.eval.n})
    yield from _of_each(config, ks)
    if config.eval.greedy and config.eval.temperature > 0:
        yield from (f"greedy/{name}" for name in _of_each(config, [1]))


def _of_each(config: Config, ks: list[int]) -> Iterator[str]:
    envs, sets = list(config.env.labels.values()), config.data.test_labels
    parts = [""]
    parts += [f"env/{label}/" for label in envs if len(envs) > 1]
    parts += [f"{label}/" for label in sets if len(sets) > 1]
    for part in parts:
        yield from (f"{part}{name}" for name in ("reward/mean", "score/mean", *(f"pass@{k}" for k in ks)))
