"""What a run that goes on from a checkpoint may not change: pure functions of plain values. Raises ConfigError."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .config import Config
from .section import Section
from .supervised import SupervisedConfig

FIXED = (
    *("run.seed", "model.path", "data.path", "env.name", "agent.name"),
    *("algo.name", "algo.advantage", "lora.rank", "optim.name"),
)
"""Options that a resumed run cannot change, where its kind has them."""
FIXED_OF_PROMPTS = ("data.probs", "data.split", "data.input_key", "data.label_key", "data.template", "data.max_samples")
"""Where a run stands in its data is a number of draws: these say which task is which draw, and what it is."""
FIXED_OF_EXAMPLES = (
    "data.probs",
    "data.split",
    "data.input_key",
    "data.answer_key",
    "data.chosen_key",
    "data.rejected_key",
    "data.template",
    "data.max_samples",
    "train.batch",
    "train.max_len",
    "train.shuffle",
    "sft.turns",
    "sft.pretrain",
    "sft.min_score",
)
"""Where a supervised run stands is a number of updates: these say which examples are in which."""
FIXED_OF_DPO = ("ref.path",)
"""The reference was asked once, before the first update."""
OWN_SECTIONS = {"env": "train", "sft": "sft", "dpo": "dpo"}


def kind_of(stored: Mapping[str, Any]) -> str:
    """The command whose configuration was stored, whole: every kind but rm has a section of its own."""
    return next((kind for section, kind in OWN_SECTIONS.items() if section in stored), "rm")


def check_kind(kind: str, stored: Mapping[str, Any], run: str) -> None:
    """The run was begun by this command."""
    began = kind_of(stored)
    if began != kind:
        raise ConfigError(
            f"--resume: {run} is a run of agentrl {began}, and does not go on as one of agentrl {kind}. Start another, with "
            f"--model {run}/final where it should begin with what was trained."
        )


def check_resumed(config: Config | SupervisedConfig, stored: Config | SupervisedConfig) -> None:
    """A run goes on with what it began with: its data, its policy, the shape of its algorithm and the kind of its optimizer
    are not changed half-way. The optimizer's options may be.
    """
    of_kind = {"train": FIXED_OF_PROMPTS, "dpo": (*FIXED_OF_EXAMPLES, *FIXED_OF_DPO)}
    for option in (*FIXED, *of_kind.get(config.kind, FIXED_OF_EXAMPLES)):
        section, _, name = option.partition(".")
        options = getattr(config, section, None)
        if not isinstance(options, Section) or name not in type(options).model_fields:
            continue
        began, now = (operator.attrgetter(option)(each) for each in (stored, config))
        if began != now:
            raise ConfigError(
                f"--resume: the run began with {option} = {began!r}, and now it is {now!r}. That makes another run: start "
                f"one, with --model {config.run.dir}/{config.run.name}/final where it should begin with what was trained."
            )
