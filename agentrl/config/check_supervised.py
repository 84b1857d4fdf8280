"""What `sft`, `rm` and `dpo` may not be asked for. Pure functions of the configuration; raise ConfigError."""

from __future__ import annotations

from ..errors import ConfigError
from .check_any_run import check_any_run
from .check_data import check_dataset
from .supervised import AnswersSection, DpoConfig, ExamplesSection, PairsSection, SftConfig, SupervisedConfig


def check_supervised(config: SupervisedConfig) -> None:
    """Everything of `sft`, `rm` and `dpo` that needs no model."""
    data, train = config.data, config.train
    if not data.path:
        raise ConfigError(f"agentrl {config.kind} learns from data: say which with --data.path FILE_OR_HUB_ID.")
    for name in ("label_key", "max_prompt_len"):
        if name in data.changed():
            raise ConfigError(f"--data.{name.replace('_', '-')} is not used by agentrl {config.kind}.")
    check_dataset(data)
    if config.ckpt.best_by is not None:
        raise ConfigError(
            f"--ckpt.best-by is not used by agentrl {config.kind}: the lowest loss makes the best checkpoint."
        )
    if train.steps is not None and "epochs" in train.changed():
        raise ConfigError("--train.epochs is not used with --train.steps, which says how many updates are made.")
    unread = [name for name in config.eval.changed() if name != "enable"]
    if unread and (not data.test_path or not config.eval.enable):
        why = "without --data.test-path" if not data.test_path else "with --eval.no-enable"
        raise ConfigError(f"--eval.{unread[0]} is not used {why}.")
    rows = 1 if config.kind == "sft" else 2
    if train.micro_batch_tokens < rows * train.max_len:
        held = "one example" if rows == 1 else "both answers of a pair"
        raise ConfigError(
            f"--train.micro-batch-tokens {train.micro_batch_tokens} does not hold {held} of --train.max-len {train.max_len} "
            "tokens: raise the one or lower the other."
        )
    if config.parallel.ranks > train.batch:
        raise ConfigError(f"--parallel.ranks {config.parallel.ranks} is more than --train.batch {train.batch}.")
    _check_kind(config)
    _check_template(data)
    check_any_run(config)


def _check_kind(config: SupervisedConfig) -> None:
    """What the kinds of training have each for themselves."""
    if isinstance(config, SftConfig):
        data, sft = config.data, config.sft
        for flag, given in (
            ("--data.answer-key", data.answer_key),
            ("--data.tools-key", data.tools_key),
            ("--data.image-key", data.image_key),
            ("--data.template", data.template),
            ("--sft.turns", None if sft.turns == "all" else sft.turns),
        ):
            if sft.pretrain and given is not None:
                raise ConfigError(f"{flag} is not used with --sft.pretrain, which trains on plain text.")
    elif isinstance(config, DpoConfig):
        if config.dpo.label_smoothing and config.dpo.kind == "ipo":
            raise ConfigError("--dpo.label-smoothing is not used with --dpo.kind ipo.")
        if config.data.margin_key is not None:
            raise ConfigError("--data.margin-key is not used by agentrl dpo: margins are for reward models.")


def _check_template(data: ExamplesSection) -> None:
    """It stands around a prompt of its own, which whole conversations do not have."""
    if data.template is None:
        return
    if isinstance(data, AnswersSection) and data.answer_key is None:
        raise ConfigError("--data.template is not used without --data.answer-key: it is for prompts with answers.")
    if isinstance(data, PairsSection) and data.input_key == data.chosen_key:
        raise ConfigError("--data.template is not used where --data.chosen-key holds whole conversations.")
