"""The options of OpenRLHF, and what each is here."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

RL = "train_ppo_ray"
"""The program that a command line without a program's name is of, unless its options say otherwise."""
SUPERVISED = ("train_sft", "train_rm", "train_dpo")
PROGRAMS = (RL, *SUPERVISED, "serve_rm", "lora_combiner")
"""The programs whose command lines are converted."""
READ = {"int": int, "float": float, "str": str, "floats": float, "strs": str}

CHOICES = {
    "algo.advantage.estimator": ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"),
    "algo.advantage.is_correction_type": ("tis", "icepop", "seq-mask-tis"),
    "algo.kl.estimator": ("k1", "k2", "k3"),
    "actor.policy_loss_type": ("ppo", "gspo"),
    "actor.optim": ("adam", "muon"),
    "optim": ("adam", "muon"),
    "ds.param_dtype": ("bf16", "fp16"),
}
"""Of the options that are converted by their value, the values there are."""


@dataclass(frozen=True)
class Option:
    """`ours` is the option here, with a remark; or `none: ` and why there is none."""

    name: str
    kind: str
    default: Any
    ours: str

    @property
    def reason(self) -> str | None:
        """Why there is none; None where there is one."""
        return self.ours.removeprefix("none: ") if self.ours.startswith("none: ") else None


@functools.cache
def options() -> dict[str, tuple[Option, ...]]:
    """Options by the programs that have them: those that several share stand once, under all their names."""
    found: dict[str, tuple[Option, ...]] = {}
    program = ""
    for line in resources.files(__package__).joinpath("options.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            found[program] = (*found.get(program, ()), _option(line))
    return found


def options_of(program: str) -> dict[str, Option]:
    """All options of one program, by name."""
    return {
        option.name: option
        for programs, some in options().items()
        if program in programs.split(", ")
        for option in some
    }


def _option(line: str) -> Option:
    name, kind, default, ours = (part.strip() for part in line.split("|"))
    return Option(name, kind, _default(kind, default), ours)


def _default(kind: str, text: str) -> Any:
    if kind == "flag":
        return False
    if text.startswith('"'):
        return json.loads(text)
    values = [READ[kind](word) for word in text.split()]
    if kind in ("floats", "strs"):
        return values or None
    return values[0] if values else None


def table() -> str:
    """The table of docs/from-openrlhf.md."""
    lines: list[str] = []
    for programs, known in options().items():
        lines += ["", f"### {programs}", "", "| option | here |", "|---|---|"]
        lines += [f"| `{option.name}` | {option.ours.replace('none: ', '–: ', 1)} |" for option in known]
    return "\n".join(lines).strip() + "\n"
