"""Algorithms of a user's own: one file, named on the command line or by an installed package."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers import Preset, algorithm, compute_advantages, policy_loss, register_trust
from agentrl.trainers.estimators import find_estimator

from agentrl import ConfigError
from agentrl.cli.train import algorithm_facts
from agentrl.config import Config
from agentrl.config.checks import check_training

from .rollouts import distance, make_rows, weights

torch.set_num_threads(1)
EXAMPLES = Path(__file__).parents[2] / "examples"
ADVANTAGE = f"{EXAMPLES / 'custom_advantage.py'}:discounted_baseline"
LOSS = f"{EXAMPLES / 'custom_loss.py'}:soft"
SAPO = f"{EXAMPLES / 'custom_loss.py'}:SAPO"


def checked(**algo: Any) -> None:
    """What `agentrl train` looks at before anything starts."""
    config = Config.model_validate({"env": {"name": "screenshot_math"}, "algo": algo, "rollout": {"n_samples": 1}})
    check_training(config, algorithm_facts(config))


def test_the_advantage_of_a_file() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    got = compute_advantages(ADVANTAGE, torch.tensor([1.0, 0.0]), mask, gamma=0.5, whiten=False)
    assert got.advantages.tolist() == [[0.25, 0.0, 0.5], [-0.25, -0.5, 0.0]]
    assert find_estimator("discounted_baseline") is find_estimator(ADVANTAGE)
    by_name = compute_advantages("discounted_baseline", torch.tensor([1.0, 0.0]), mask, gamma=0.5)
    assert by_name.advantages[0, 2] == -by_name.advantages[1, 1] > 0


def test_the_example_files_are_short() -> None:
    for name in ("custom_advantage.py", "custom_loss.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) < 60


def test_the_loss_of_a_file_is_the_plain_gradient_on_policy_and_fades_off_it() -> None:
    log_ratio = torch.tensor([[0.0, 1.0, -1.0]])
    for advantage, sharp in ((2.0, 1.0), (-2.0, 1.05)):
        logp = log_ratio.clone().requires_grad_()
        advantages = torch.full((1, 3), advantage)
        loss, metrics = policy_loss(logp, torch.zeros(1, 3), advantages, torch.ones(1, 3), trust=LOSS)
        loss.backward()
        ratio = log_ratio.exp()
        gate = torch.sigmoid(sharp * (ratio - 1))
        torch.testing.assert_close(logp.grad, -advantage * ratio * 4 * gate * (1 - gate) / 3)
        assert logp.grad is not None and logp.grad[0, 0].item() == pytest.approx(-advantage / 3)
        assert metrics["clip_fraction"].total == 0


def test_a_file_can_hold_a_whole_composition() -> None:
    preset = algorithm(SAPO)
    assert (preset.advantage, preset.trust, preset.aggregation) == ("grpo", "soft", "sequence_mean")
    assert find_estimator(SAPO).name == "grpo"


@pytest.mark.parametrize(
    "algo",
    [{"name": ADVANTAGE}, {"name": "dapo", "advantage": ADVANTAGE}, {"name": "grpo", "trust": LOSS}, {"name": SAPO}],
    ids=["algorithm", "advantage", "trust", "preset"],
)
def test_the_trainer_updates_with_it_whatever_the_cut(make_trainer: Callable[..., Any], algo: dict[str, Any]) -> None:
    rollout = {"max_total_tokens": 100}
    algo = algo | {"old_logp": "rollout"}
    results = []
    for budget in (100_000, 40):
        trainer = make_trainer(algo=algo, rollout=rollout, train={"micro_batch_tokens": budget})
        before = weights(trainer)
        report = trainer.train(make_rows(), 0)
        assert report.updated and math.isfinite(report.metrics["policy/loss"])
        assert distance(before, weights(trainer)) > 1e-4
        results.append(weights(trainer))
    assert distance(*results) < 1e-6


def test_the_command_line_knows_what_the_file_asks_for() -> None:
    with pytest.raises(ConfigError, match=r"custom_advantage.py:discounted_baseline compares the members of a group"):
        checked(name=ADVANTAGE)
    with pytest.raises(ConfigError, match="compares the members"):
        checked(name="reinforce_pp", advantage=ADVANTAGE)
    checked(name="reinforce_pp", trust=LOSS)


@pytest.mark.parametrize(
    ("algo", "said"),
    [
        ({"name": "grpoo"}, r"Did you mean .*grpo"),
        ({"advantage": "rlo"}, "Did you mean rloo"),
        ({"trust": "cipso"}, "Did you mean cispo"),
        ({"name": "nowhere.py:mine"}, "There is no file nowhere.py"),
        ({"name": ADVANTAGE + "s"}, "defines no 'discounted_baselines'. Did you mean discounted_baseline"),
        ({"name": f"{EXAMPLES / 'custom_loss.py'}:soft"}, "neither decorated with @register_advantage nor a Preset"),
        ({"trust": ADVANTAGE}, "no trust region named"),
        ({"trust": LOSS, "dual_clip": 3.0}, "--algo.dual-clip is not used with .*soft"),
    ],
)
def test_what_is_not_there_or_not_used_is_refused(algo: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(**algo)


def test_a_composition_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from agentrl.trainers import Preset\nBAD = Preset('bad', 'grpo', clip=(1.5, 0.2))\n")
    with pytest.raises(ConfigError, match=r"clip \(1.5, 0.2\)"):
        checked(name=f"{file}:BAD")


def test_the_bounds_of_a_clip_are_those_of_the_trust_region_of_the_composition(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrl.trainers import Preset\nMINE = Preset('mine', 'reinforce', trust='cispo', clip=(1, 1))\n"
    )
    checked(name=f"{file}:MINE", clip=(1.0, 0.3))
    with pytest.raises(ConfigError, match=r"clip \(1.0, 0.3\)"):
        checked(name=f"{file}:MINE", clip=(1.0, 0.3), trust="clip")


def test_an_objective_that_does_not_scale_with_the_advantage_is_refused() -> None:
    with pytest.raises(ValueError, match="'square': twice the advantage"):
        register_trust("square")(lambda t: (t.ratio * t.advantages.square(), t.mask))


def test_an_installed_package_adds_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "their_package.py").write_text(
        "from agentrl.trainers import Preset, register_advantage\n"
        "@register_advantage('their_advantage')\n"
        "def their_advantage(d): return d.at_end(2 * d.rewards)\n"
        "PRESET = Preset('their_preset', 'their_advantage', clip=(0.1, 0.1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    group = "agentrl.algorithms"
    points = [
        importlib.metadata.EntryPoint("their_advantage", "their_package:their_advantage", group),
        importlib.metadata.EntryPoint("their_preset", "their_package:PRESET", group),
    ]
    installed = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **ask: points if ask == {"group": group} else installed(**ask)
    )
    assert algorithm("their_preset") == Preset("their_preset", "their_advantage", clip=(0.1, 0.1))
    assert algorithm("their_advantage").advantage == "their_advantage"
    got = compute_advantages("their_preset", torch.tensor([3.0]), torch.ones(1, 2))
    assert got.advantages.tolist() == [[0.0, 6.0]]
