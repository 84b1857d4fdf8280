"""What `sft`, `rm` and `dpo` share: options, checks, and a run from its first line to its last."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ..assemble import make_renderer
from ..cluster import check_trainer_gpus, connected, trainer_cpus
from ..config import SftConfig, SupervisedConfig
from ..config.check_supervised import check_supervised
from ..config.dump import to_toml
from ..config.load import parse_command, with_stored_config
from ..config.section import Section
from ..errors import ConfigError
from ..image_store import ImageStore
from ..model_folder import is_small, max_positions, model_config
from ..placement import Reservation, reserved, wanted_by_trainer
from ..renderer import Renderer
from ..report.progress import SHOWN_SUPERVISED
from ..supervised.dataset import load_examples
from ..supervised.examples import Examples
from ..supervised.plan import SupervisedPlan, describe, make_plan
from ..supervised.recorded import show_pictures
from ..supervised.run import StartTrainer, SupervisedParts, supervised_run
from .console import out, progress_bar
from .exits import DONE, INTERRUPTED
from .policy import choose_model, with_folders
from .signals import terminable, until_signal
from .training import begun, check_sinks, interrupted_lines, reporter_of, run_folder


class CommandOptions(Section):
    """What is not part of the configuration."""

    config: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """TOML or YAML file with options; flags win over it."""
    dry_run: bool = False
    """Read the data, print the effective configuration and the plan, and exit."""
    debug: bool = False
    """Show stack traces."""


C = TypeVar("C", bound=SupervisedConfig)


def run_command(kind: type[C], command: type[Section], argv: list[str], description: str) -> int:
    """The exit code of `agentrl KIND ARGV`. `command` = the configuration and CommandOptions in one."""
    name = kind.kind
    argv = with_stored_config(argv, name)
    given: Any = parse_command(command, argv, prog=f"agentrl {name}", description=description)
    config = kind(**{section: getattr(given, section) for section in kind.model_fields})
    logging.basicConfig(level=logging.DEBUG if given.debug else logging.WARNING, format="%(levelname)s %(message)s")
    check_supervised(config)
    check_sinks(config)
    folder, resume_from = run_folder(config, Path(config.data.path[0]).stem, name)
    with ExitStack() as session:
        if given.dry_run:
            return _dry_run(config)
        session.enter_context(connected(trainer_cpus(config.parallel) + 1))
        session.enter_context(terminable())
        gpus = check_trainer_gpus(config.parallel)
        model, whole = _model(config, gpus), with_folders(config)
        examples, held_out = _examples(config, model, ImageStore(folder.images))
        plan = make_plan(config, len(examples), tiny=is_small(model))
        _show(config, model, examples, held_out, plan)
        wanted = wanted_by_trainer(config.parallel, gpus)
        starter = _trainer_starter(session.enter_context(reserved(wanted, gpus, config.watchdog)))
        session.enter_context(begun(folder, config, resume_from))
        return _run(SupervisedParts(whole, model, examples, held_out, plan, folder, starter, resume_from))


def _dry_run(config: SupervisedConfig) -> int:
    model = _model(config, 0.0)
    with_folders(config)
    examples, held_out = _examples(config, model, None)
    _show(config, model, examples, held_out, make_plan(config, len(examples), tiny=is_small(model)))
    out.print(to_toml(config), markup=False, highlight=False)
    return DONE


def _model(config: SupervisedConfig, gpus: float) -> str:
    """The model's folder. Raises ConfigError."""
    path = choose_model(config, config.data.image_key is not None or show_pictures(config), gpus)
    longest = max_positions(model_config(path))
    if longest is not None and config.train.max_len > longest and "max_len" in config.train.changed():
        raise ConfigError(f"--train.max-len {config.train.max_len}: {path} was made for {longest} tokens at most.")
    return path


def _examples(config: SupervisedConfig, model: str, store: ImageStore | None) -> tuple[Examples, Examples | None]:
    """(those to train on, the held-out ones)."""
    longest = max_positions(model_config(model)) or config.train.max_len
    train = config.train.model_copy(update={"max_len": min(config.train.max_len, longest)})
    config = config.model_copy(update={"train": train})
    renderer = _renderer(config, model)
    with progress_bar() as bar:
        examples = load_examples(config, renderer, store, lambda share: bar("examples", share))
        if not config.data.test_path or not config.eval.enable:
            return examples, None
        told = lambda share: bar("held-out examples", share)  # noqa: E731
        return examples, load_examples(config, renderer, store, told, held_out=True)


def _renderer(config: SupervisedConfig, model: str) -> Renderer:
    """Plain text needs no chat template."""
    try:
        return make_renderer(config, model)
    except ConfigError:
        if not (isinstance(config, SftConfig) and config.sft.pretrain and config.model.chat_template == "auto"):
            raise
    plain = config.model.model_copy(update={"chat_template": "none"})
    return make_renderer(config.model_copy(update={"model": plain}), model)


def _show(
    config: SupervisedConfig, model: str, examples: Examples, held_out: Examples | None, plan: SupervisedPlan
) -> None:
    what = "examples" if config.kind == "sft" else "pairs"
    lines = [f"model {model}", examples.describe(what)]
    lines.append("no held-out data: no evaluation" if held_out is None else held_out.describe(f"held-out {what}"))
    for line in [*lines, *describe(config, plan)]:
        out.print(line, highlight=False, soft_wrap=True)


def _run(parts: SupervisedParts) -> int:
    with reporter_of(parts.config, parts.folder, parts.plan.steps, SHOWN_SUPERVISED) as reporter:
        interrupted = asyncio.run(until_signal(supervised_run(parts, reporter)))
    for line in _ending(parts, interrupted):
        out.print(line, highlight=False, soft_wrap=True)
    return INTERRUPTED if interrupted else DONE


def _ending(parts: SupervisedParts, interrupted: bool) -> list[str]:
    """What came of the run, and what can be done next."""
    folder = parts.folder
    if interrupted:
        return interrupted_lines(folder, parts.config.kind)
    records = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    results = [record for record in records if "eval/loss" in record]
    lines = [f"Done: {folder.path}", f"The model: {folder.final}"]
    if len(results) > 1:
        first, last = results[0], results[-1]
        lines.insert(
            0,
            f"held-out loss {first['eval/loss']:.4f} before, {last['eval/loss']:.4f} after {last['step']} updates; "
            f"accuracy {first['eval/accuracy']:.3f} before, {last['eval/accuracy']:.3f} after",
        )
    return lines


def _trainer_starter(reservation: Reservation) -> StartTrainer:
    from agentrl.trainers.group import SupervisedGroup

    return partial(SupervisedGroup.start, reservation=reservation)
