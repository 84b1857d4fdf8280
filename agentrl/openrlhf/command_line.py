"""A command line of OpenRLHF's, read: which program it is of, and the values of its options.

No message shows a word that is not where it belongs: it may be a key.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ConfigError
from ..registry import suggest
from .older import newer
from .options import CHOICES, PROGRAMS, READ, RL, Option, options_of

COUNTERPARTS = {
    "batch_inference": "is agentrl rollout here, which samples and scores replies",
    "interactive_chat": "has no counterpart here; agentrl serve policy serves a model to chat clients",
}
"""What programs are that are not converted; those that are not listed have no counterpart."""
MODULE = re.compile(r"openrlhf\.cli\.(\w+)|(?:.*/)?openrlhf/cli/(\w+)\.py")
BARE = re.compile(rf"(?:.*/)?({'|'.join([*PROGRAMS, *COUNTERPARTS])}|train_\w+)(?:\.py)?")
RANKS = re.compile(r"--(?:num_gpus|nproc_per_node|nproc-per-node)(?:=(\d+))?")
"""What says to deepspeed or torchrun how many processes train."""


@dataclass(frozen=True)
class CommandLine:
    """`values` = of every option of the program, `given` = the names of those that are in the line, `ranks` = the processes
    that its launcher was told to start, None where it was not told.
    """

    program: str
    values: Mapping[str, Any]
    given: Collection[str]
    ranks: int | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"from-openrlhf: {message}.")


def parse(argv: Sequence[str]) -> CommandLine:
    """What stands before the program's name is left out: python, or a whole `ray job submit … --`. Raises ConfigError for a
    program that is not converted, with its counterpart, and for unknown options, with the nearest.
    """
    program, before, words = _split(argv)
    program = program or _program_of(words)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    known = options_of(program)
    for option in known.values():
        _add(parser, option)
    _check_older(words, known)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(f"from-openrlhf: {_stray(unknown[0], words, program)}")
    values = {name: option.default for name, option in known.items()}
    return CommandLine(program, values | vars(given), set(vars(given)), _ranks(before))


def _split(argv: Sequence[str]) -> tuple[str | None, Sequence[str], list[str]]:
    """(the program's name if it is there, the words before it, those after it)."""
    for i, word in enumerate(argv):
        program = _program(word, argv[i - 1] if i else "")
        if program in PROGRAMS:
            return program, argv[:i], [word for word in argv[i + 1 :] if word != "--"]
        if program is not None:
            said = COUNTERPARTS.get(program, "has no counterpart here")
            raise ConfigError(f"from-openrlhf: {program} {said}. What is converted is {', '.join(PROGRAMS)}.")
    if any(_is_command(word) for word in argv):
        raise ConfigError("from-openrlhf: the command is one quoted word; leave out the quotes around the whole.")
    return None, (), list(argv)


def _program(word: str, before: str) -> str | None:
    """The program of OpenRLHF's that a word names, as a module or a file. What follows an option is that option's value."""
    found = MODULE.fullmatch(word)
    if found is None and (not before.startswith("--") or before == "--" or "=" in before):
        found = BARE.fullmatch(word)
    return None if found is None else found[found.lastindex or 0]


def _program_of(words: Sequence[str]) -> str:
    """The program that has the most of the options: train_ppo_ray where it is one of those. Raises ConfigError where it is
    not, and they are several.
    """
    names = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    had = {program: len(names & options_of(program).keys()) for program in PROGRAMS}
    most = [program for program in PROGRAMS if had[program] == max(had.values())]
    if most[0] == RL or len(most) == 1:
        return most[0]
    shown = min(names & options_of(most[0]).keys())
    raise ConfigError(
        f"from-openrlhf: {', '.join(most)} have these options: put the program's name before them, as in "
        f"agentrl from-openrlhf -- {most[0]} --{shown} …."
    )


def _ranks(before: Sequence[str]) -> int | None:
    found = None
    for word, following in itertools.pairwise([*before, ""]):
        match = RANKS.fullmatch(word)
        count = match and (match[1] or following)
        found = int(count) if count and count.isdigit() and int(count) else found
    return found


def _is_command(word: str) -> bool:
    """Whether a word holds several of a command line."""
    words = word.split()
    return len(words) > 1 and ((words[0].startswith("--") and "=" not in words[0]) or any(map(_named, words)))


def _named(word: str) -> bool:
    return MODULE.fullmatch(word) is not None or (BARE.fullmatch(word) is not None and word.endswith(".py"))


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    if option.kind == "flag":
        parser.add_argument(f"--{option.name}", dest=option.name, action="store_true")
    else:
        many = "+" if option.kind in ("floats", "strs") else None
        choices = CHOICES.get(option.name)
        parser.add_argument(
            f"--{option.name}", dest=option.name, type=READ[option.kind], nargs=many, choices=choices, metavar="VALUE"
        )


def _check_older(argv: Sequence[str], known: Collection[str]) -> None:
    """Raises ConfigError with all the options that an older version named otherwise, and their present names."""
    names = dict.fromkeys(word[2:].partition("=")[0] for word in argv if word.startswith("--"))
    found = [f"--{name} is --{now}" for name in names if name not in known and (now := newer(name, known))]
    if found:
        raise ConfigError(
            f"from-openrlhf: these options are of an older OpenRLHF; in its version 0.11 {', '.join(found)}."
        )


def _stray(word: str, argv: Sequence[str], program: str) -> str:
    """What is wrong with a word that no option takes."""
    if word.startswith("-") and not any(character.isspace() for character in word):
        name = word.partition("=")[0]
        return f"{program} has no option {name}.{_nearest(name.lstrip('-'), list(options_of(program)))}"
    before = [other.partition("=")[0] for other in argv[: argv.index(word)] if other.startswith("--")]
    where = f"after {before[-1]} there is a word too many" if before else "the first word is no option"
    return f"{where}. Give {program} and its options, each a word of its own."


def _nearest(wrong: str, known: list[str]) -> str:
    """Names that are near, or that end alike."""
    same_end = [name for name in known if name.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return f" Did you mean {' or '.join(same_end[:3])}?" if same_end else suggest(wrong, known)
