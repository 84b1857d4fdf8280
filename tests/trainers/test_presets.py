"""The table of compositions, and what loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from agentrl.trainers import PRESETS, algorithm, find_preset, register_advantage
from agentrl.trainers.advantages import find_estimator

from agentrl import trainers

TABLE = {
    "ppo": ("gae", "token", (0.2, 0.2), "clip", "token_mean"),
    "reinforce_pp": ("reinforce", "token", (0.2, 0.2), "clip", "token_mean"),
    "reinforce_pp_baseline": ("reinforce_baseline", "token", (0.2, 0.2), "clip", "token_mean"),
    "rloo": ("rloo", "token", (0.2, 0.2), "clip", "token_mean"),
    "grpo": ("grpo", "token", (0.2, 0.2), "clip", "sequence_mean"),
    "dr_grpo": ("dr_grpo", "token", (0.2, 0.2), "clip", "constant"),
    "dapo": ("grpo", "token", (0.2, 0.28), "clip", "token_mean"),
    "gspo": ("grpo", "sequence", (3e-4, 4e-4), "clip", "sequence_mean"),
    "cispo": ("grpo", "token", (1.0, 0.28), "cispo", "token_mean"),
}


def test_the_table() -> None:
    assert {p.name: (p.advantage, p.level, p.clip, p.trust, p.aggregation) for p in PRESETS} == TABLE
    assert [p.name for p in PRESETS if find_estimator(p.name).critic] == ["ppo"]
    assert [p.name for p in PRESETS if p.filter_groups and p.overlong_penalty] == ["dapo"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("gae", "ppo"),
        ("reinforce", "reinforce_pp"),
        ("reinforce_baseline", "reinforce_pp_baseline"),
        ("group_norm", "grpo"),
        ("rloo", "rloo"),
        ("dr_grpo", "dr_grpo"),
    ],
)
def test_openrlhf_names_are_aliases(alias: str, name: str) -> None:
    assert find_preset(alias).name == name


def test_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Did you mean .*reinforce_pp"):
        find_preset("reinforce++")


def test_a_registered_estimator_is_an_algorithm_with_the_default_axes() -> None:
    register_advantage("zero_everywhere", critic=True)(lambda d: 0 * d.penalty)
    got = algorithm("zero_everywhere")
    assert (got.advantage, got.level, got.clip) == ("zero_everywhere", "token", (0.2, 0.2))
    assert find_estimator("zero_everywhere").critic
    assert algorithm("grpo") is find_preset("grpo")
    with pytest.raises(ValueError, match="no algorithm or advantage named"):
        algorithm("nothing_like_it")


def test_every_public_name_can_be_imported_and_no_other() -> None:
    for name in trainers.__all__:
        assert getattr(trainers, name) is not None
        assert name in dir(trainers)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = trainers.no_such_thing


def test_plain_arithmetic_needs_no_torch() -> None:
    code = """
import sys
from agentrl.trainers import PRESETS, Preset, find_preset, keep_group, kl_controller, pass_at_k, planned_updates
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
