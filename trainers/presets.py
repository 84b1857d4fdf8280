"""The named compositions: which choice each algorithm makes on each axis.

All of them: KL 0, entropy 0, gamma = lam = 1, one update per batch. Any axis can be overridden.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import suggest


@dataclass(frozen=True)
class Preset:
    """One row of the table.

    advantage = an estimator's name; level = token | sequence (of the ratio); clip = (low, high) around 1; trust =
    clip | cispo; aggregation = token_mean | sequence_mean | constant (constant: rollouts x rollout.max_total_tokens).
    filter_groups, overlong_penalty: that shaping is on. aliases: OpenRLHF's names.
    """

    name: str
    advantage: str
    level: str = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    trust: str = "clip"
    aggregation: str = "token_mean"
    filter_groups: bool = False
    overlong_penalty: bool = False
    aliases: tuple[str, ...] = ()


PRESETS = (
    Preset("ppo", "gae", aliases=("gae",)),
    Preset("reinforce_pp", "reinforce", aliases=("reinforce",)),
    Preset("reinforce_pp_baseline", "reinforce_baseline", aliases=("reinforce_baseline",)),
    Preset("rloo", "rloo"),
    Preset("grpo", "grpo", aggregation="sequence_mean", aliases=("group_norm",)),
    Preset("dr_grpo", "dr_grpo", aggregation="constant"),
    Preset("dapo", "grpo", clip=(0.2, 0.28), filter_groups=True, overlong_penalty=True),
    Preset("gspo", "grpo", level="sequence", clip=(3e-4, 4e-4), aggregation="sequence_mean"),
    Preset("cispo", "grpo", trust="cispo", clip=(1.0, 0.28)),
)
_BY_NAME = {name: preset for preset in PRESETS for name in (preset.name, *preset.aliases)}


def preset_names() -> list[str]:
    """Every name and alias."""
    return list(_BY_NAME)


def find_preset(name: str) -> Preset:
    """The preset of a name or alias. Raises ValueError with the nearest names when there is none."""
    if name not in _BY_NAME:
        known = ", ".join(_BY_NAME)
        raise ValueError(f"There is no algorithm named {name!r}.{suggest(name, _BY_NAME)} Known: {known}.")
    return _BY_NAME[name]
