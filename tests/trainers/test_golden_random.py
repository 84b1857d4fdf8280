"""Every random case of golden.json: 17 advantages and 14 policy losses on each of its batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers import compute_advantages, policy_loss

torch.set_num_threads(1)
CASES = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["random"]
ADVANTAGES = [(i, j) for i, case in enumerate(CASES) for j in range(len(case["expected"]["advantages"]))]
LOSSES = [(i, j) for i, case in enumerate(CASES) for j in range(len(case["expected"]["policy_loss"]))]


def tensor(values: Any) -> torch.Tensor:
    if isinstance(values, list) and values and not isinstance(values[0], list):
        values = [float("nan") if v is None else v for v in values]
    return torch.tensor(values, dtype=torch.float32)


def assert_close(got: torch.Tensor, want: Any) -> None:
    torch.testing.assert_close(got, tensor(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "entry"), ADVANTAGES)
def test_advantages(case: int, entry: int) -> None:
    given, want = CASES[case]["input"], CASES[case]["expected"]["advantages"][entry]
    options = dict(want["options"]) | {name: tensor(given[name]) for name in want["uses"]}
    rewards, groups = given["rewards"], given["groups"]
    if want["rollouts"]:
        rewards, groups = given["rollout_rewards"], given["rollout_groups"]
        options["rollout_ids"] = torch.tensor(given["rollouts"])
    got = compute_advantages(
        want["name"], tensor(rewards), tensor(given["mask"]).bool(), group_ids=torch.tensor(groups), **options
    )
    assert_close(got.advantages, want["advantages"])
    assert_close(got.returns, want["returns"])
    assert got.valid.tolist() == want["valid"]
    assert got.advantages.dtype == got.returns.dtype == torch.float32


@pytest.mark.parametrize(("case", "entry"), LOSSES)
def test_policy_loss(case: int, entry: int) -> None:
    given, expected = CASES[case]["input"], CASES[case]["expected"]
    want = expected["policy_loss"][entry]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in want["options"].items()}
    if "correction" in options:
        options["rollout_logp"] = tensor(given["rollout_logp"])
    if want["rollouts"]:
        options["rollout_ids"] = torch.tensor(given["rollouts"])
    got = policy_loss(
        tensor(given["logp"]),
        tensor(given["old_logp"]),
        tensor(expected["policy_advantages"]),
        tensor(expected["policy_mask"]).bool(),
        **options,
    )
    assert_close(got.loss, want["loss"])
