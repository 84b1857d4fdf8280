"""A command line of OpenRLHF's as a configuration of ours, or as a command.

What counts is the value an option has, given or by default: what differs from our default is set, so that the run is the
one they had. What cannot be said here is a note.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Config, DpoConfig, RmConfig, SftConfig
from ..config.dump import as_toml
from ..config.load import validated
from ..config.section import Section
from . import programs, rl, supervised
from .command_line import CommandLine, parse
from .options import RL, options_of
from .shared import Theirs

Part = Callable[[Theirs, list[str]], dict[str, Any]]
RUNS: dict[str, tuple[str, type[Section], Sequence[Part]]] = {
    RL: ("train", Config, rl.PARTS),
    "train_sft": ("sft", SftConfig, supervised.SFT),
    "train_rm": ("rm", RmConfig, supervised.RM),
    "train_dpo": ("dpo", DpoConfig, supervised.DPO),
}
"""Program -> (our command, its configuration, the parts that convert its options)."""
COMMANDS: dict[str, Callable[[Theirs, list[str]], Sequence[str]]] = {
    "serve_rm": programs.serve_rm,
    "lora_combiner": programs.lora_combiner,
}
"""The programs that are a command with its flags, without a configuration."""


@dataclass
class Converted:
    """`command` = the words of ours; `values` = dotted options of its configuration, `kind`, with their values; `notes` = what
    has no counterpart, in words.
    """

    command: Sequence[str]
    kind: type[Section] | None
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def nested(self) -> dict[str, Any]:
        """Sections of options, without those that have our default. Raises ConfigError for what cannot be."""
        tree: dict[str, Any] = {}
        for name, value in self.values.items():
            *sections, key = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return {} if self.kind is None else changed(validated(self.kind, tree, None), self.kind())

    def shown(self) -> str:
        """The notes as comments, then the configuration as TOML, or the command where there is none."""
        settings = "" if self.kind is None else as_toml(self.nested())
        words = shlex.join(self.command)
        said = [f"# {' '.join(note.split())}" for note in self.notes]
        if self.kind is None:
            return "\n".join([*said, words]) + "\n"
        return "\n".join([f"# for {words}", *said]) + "\n" + settings


def changed(section: Section, default: Section) -> dict[str, Any]:
    """What differs from the defaults, section by section."""
    return _changed(section.model_dump(), default.model_dump())


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            inner = _changed(value, defaults[key])
            found |= {key: inner} if inner else {}
        elif value != defaults[key]:
            found[key] = value
    return found


def convert(argv: Sequence[str]) -> Converted:
    """Raises ConfigError for what is unknown, and for what cannot be here, with the reason."""
    line = parse(argv)
    out = _run(line) if line.program in RUNS else _command(line)
    reasons = {name: option.reason for name, option in options_of(line.program).items()}
    out.notes += [f"{name}: {reasons[name]}" for name in sorted(line.given) if reasons[name] is not None]
    return out


def _run(line: CommandLine) -> Converted:
    name, kind, parts = RUNS[line.program]
    out = Converted(["agentrl", name, "--config", "FILE"], kind)
    for part in parts:
        out.values |= {option: value for option, value in part(line.values, out.notes).items() if value is not None}
    if line.program != RL:
        _ranks(line, out)
    return out


def _ranks(line: CommandLine, out: Converted) -> None:
    """Their launcher says how many processes train; without a word of its own deepspeed starts one for each GPU."""
    if line.ranks is None:
        out.notes.append("how many GPUs train is not said: deepspeed takes all there are, here parallel.ranks says it")
    else:
        out.values["parallel.ranks"] = line.ranks


def _command(line: CommandLine) -> Converted:
    notes: list[str] = []
    return Converted(COMMANDS[line.program](line.values, notes), None, notes=notes)
