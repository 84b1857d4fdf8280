"""Everything that computes a gradient: advantages, losses, and the trainers built on them.

`import agentrl.trainers` loads no torch: each public name is imported from its module when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config.plan import planned_updates as planned_updates
    from ..group_statistics import keep_group as keep_group
    from ..group_statistics import pass_at_k as pass_at_k
    from .advantages import Advantages as Advantages
    from .advantages import compute_advantages as compute_advantages
    from .aggregation import aggregate as aggregate
    from .aggregation import token_weights as token_weights
    from .corrections import correction_weights as correction_weights
    from .decisions import Decisions as Decisions
    from .decisions import to_go as to_go
    from .distribution import entropy as entropy
    from .distribution import token_logprobs as token_logprobs
    from .estimators import algorithm as algorithm
    from .estimators import register_advantage as register_advantage
    from .kl import kl_estimate as kl_estimate
    from .kl import kl_loss as kl_loss
    from .kl_control import AdaptiveKL as AdaptiveKL
    from .kl_control import FixedKL as FixedKL
    from .kl_control import kl_controller as kl_controller
    from .losses import Loss as Loss
    from .losses import policy_loss as policy_loss
    from .losses import value_loss as value_loss
    from .metrics import Mean as Mean
    from .metrics import averages as averages
    from .metrics import merge as merge
    from .preference import dpo_loss as dpo_loss
    from .preference import reward_model_loss as reward_model_loss
    from .presets import PRESETS as PRESETS
    from .presets import Preset as Preset
    from .presets import find_preset as find_preset
    from .shaping import clip_rewards as clip_rewards
    from .shaping import overlong_mask as overlong_mask
    from .shaping import overlong_penalty as overlong_penalty
    from .shaping import stale_mask as stale_mask
    from .shaping import stop_properly as stop_properly
    from .trust import PolicyTerms as PolicyTerms
    from .trust import register_trust as register_trust
    from .whitening import whiten as whiten

_MODULES = {
    ".config.plan": ("planned_updates",),
    ".group_statistics": ("keep_group", "pass_at_k"),
    "advantages": ("Advantages", "compute_advantages"),
    "aggregation": ("aggregate", "token_weights"),
    "corrections": ("correction_weights",),
    "decisions": ("Decisions", "to_go"),
    "distribution": ("entropy", "token_logprobs"),
    "estimators": ("algorithm", "register_advantage"),
    "kl": ("kl_estimate", "kl_loss"),
    "kl_control": ("AdaptiveKL", "FixedKL", "kl_controller"),
    "losses": ("Loss", "policy_loss", "value_loss"),
    "metrics": ("Mean", "averages", "merge"),
    "preference": ("dpo_loss", "reward_model_loss"),
    "presets": ("PRESETS", "Preset", "find_preset"),
    "shaping": ("clip_rewards", "overlong_mask", "overlong_penalty", "stale_mask", "stop_properly"),
    "trust": ("PolicyTerms", "register_trust"),
    "whitening": ("whiten",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
