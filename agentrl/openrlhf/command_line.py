"""A command line of OpenRLHF's, read: which program it is of, and the values of its options.

No message shows a word that is not where it belongs: it may be a key.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import ConfigError
from ..registry import suggest
from .older import newer
from .options import CHOICES, CONVERTED, READ, Option, options

BY_HAND = "its options are converted by hand, with the second table in docs/from-openrlhf.md"
COUNTERPARTS = {
    "train_sft": f"is agentrl sft here: {BY_HAND}",
    "train_rm": f"is agentrl rm here: {BY_HAND}",
    "train_dpo": f"is agentrl dpo here: {BY_HAND}",
    "serve_rm": "is agentrl serve reward here: docs/from-openrlhf.md says what its options are",
    "lora_combiner": "is agentrl export here: docs/from-openrlhf.md says what its options are",
    "batch_inference": "is agentrl rollout here, which samples and scores replies",
    "interactive_chat": "has no counterpart here; agentrl serve policy serves a model to chat clients",
}
"""What the other programs are; those that are not listed have no counterpart."""
MODULE = re.compile(r"openrlhf\.cli\.(\w+)")
BARE = re.compile(rf"(?:.*/)?({CONVERTED}|{'|'.join(COUNTERPARTS)}|train_\w+)(?:\.py)?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"from-openrlhf: {message}.")


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """(the value of every option of train_ppo_ray, those that were given). What stands before the program's name is left
    out: python, or a whole `ray job submit … --`. Raises ConfigError for another program, with its counterpart, and for
    unknown options, with the nearest.
    """
    argv = _own_words(argv)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    known = {option.name: option for option in options()[CONVERTED]}
    for option in known.values():
        _add(parser, option)
    _check_older(argv, known)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(f"from-openrlhf: {_stray(unknown[0], argv, list(known))}")
    values = {name: option.default for name, option in known.items()}
    return values | vars(given), set(vars(given))


def _own_words(argv: Sequence[str]) -> list[str]:
    """The words after the program's name."""
    for i, word in enumerate(argv):
        program = _program(word, argv[i - 1] if i else "")
        if program == CONVERTED:
            return [word for word in argv[i + 1 :] if word != "--"]
        if program is not None:
            said = COUNTERPARTS.get(program, "has no counterpart here")
            raise ConfigError(f"from-openrlhf: {program} {said}. What is converted is {CONVERTED}.")
    if any(_is_command(word) for word in argv):
        raise ConfigError("from-openrlhf: the command is one quoted word; leave out the quotes around the whole.")
    return list(argv)


def _program(word: str, before: str) -> str | None:
    """The program of OpenRLHF's that a word names, as a module or a file. What follows an option is that option's value."""
    found = MODULE.fullmatch(word)
    if found is None and (not before.startswith("--") or before == "--"):
        found = BARE.fullmatch(word)
    return None if found is None else found[1]


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


def _check_older(argv: Sequence[str], known: dict[str, Option]) -> None:
    """Raises ConfigError with all the options that an older version named otherwise, and their present names."""
    names = dict.fromkeys(word[2:].partition("=")[0] for word in argv if word.startswith("--"))
    found = [f"--{name} is --{now}" for name in names if name not in known and (now := newer(name, known))]
    if found:
        raise ConfigError(
            f"from-openrlhf: these options are of an older OpenRLHF; in its version 0.11 {', '.join(found)}."
        )


def _stray(word: str, argv: Sequence[str], known: list[str]) -> str:
    """What is wrong with a word that no option takes."""
    if word.startswith("-") and not any(character.isspace() for character in word):
        name = word.partition("=")[0]
        return f"{CONVERTED} has no option {name}.{_nearest(name.lstrip('-'), known)}"
    before = [other.partition("=")[0] for other in argv[: argv.index(word)] if other.startswith("--")]
    where = f"after {before[-1]} there is a word too many" if before else "the first word is no option"
    return f"{where}. Give {CONVERTED} and its options, each a word of its own."


def _nearest(wrong: str, known: list[str]) -> str:
    """Names that are near, or that end alike."""
    same_end = [name for name in known if name.rpartition(".")[2] == wrong.rpartition(".")[2]]
    return f" Did you mean {' or '.join(same_end[:3])}?" if same_end else suggest(wrong, known)
