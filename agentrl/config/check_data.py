"""What the data section may not ask for. Raises ConfigError that names the flags."""

from __future__ import annotations

from ..errors import ConfigError
from .config import Config
from .where import DataSection


def check_data(config: Config) -> None:
    """Options of a dataset come with one, and those that belong together agree."""
    data = config.data
    set_keys = [name for name in data.changed() if name != "path"]
    if not data.path and set_keys:
        raise ConfigError(f"--data.{set_keys[0].replace('_', '-')} is not used without --data.path.")
    check_dataset(data)
    if data.max_prompt_len is not None and (config.env.name or config.agent.name):
        raise ConfigError("--data.max-prompt-len is not used with --env or --agent, which make the prompt.")
    if data.max_prompt_len is not None and data.max_prompt_len >= config.rollout.max_len:
        raise ConfigError(
            f"--data.max-prompt-len {data.max_prompt_len}: --rollout.max-len {config.rollout.max_len} leaves no room for a reply."
        )


def check_dataset(data: DataSection) -> None:
    """What holds for the data of every kind of run."""
    if data.probs and len(data.probs) != len(data.path):
        raise ConfigError(f"--data.probs gives {len(data.probs)} numbers for {len(data.path)} datasets.")
    if data.probs and (min(data.probs) < 0 or not sum(data.probs)):
        raise ConfigError("--data.probs: they must be at least 0, and one of them above.")
    if data.template is not None and data.template.count("{}") != 1:
        raise ConfigError(f"--data.template {data.template!r}: it must have {{}} once, where the prompt stands.")
    if data.min_pixels and data.max_pixels and data.min_pixels > data.max_pixels:
        raise ConfigError(f"--data.min-pixels {data.min_pixels} is more than --data.max-pixels {data.max_pixels}.")
    if data.test_split is not None and not data.test_path:
        raise ConfigError("--data.test-split is not used without --data.test-path.")
