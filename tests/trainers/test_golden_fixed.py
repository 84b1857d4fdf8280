"""Every fixed case of golden.json, one test a case."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl import trainers as T

torch.set_num_threads(1)
FIXED = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["fixed"]


def tensor(values: Any) -> Tensor:
    if isinstance(values, list) and values and isinstance(values[0], list):
        return torch.stack([tensor(row) for row in values])
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float32)


def ragged(rows: list[list[float]], fill: float = math.nan) -> tuple[Tensor, Tensor]:
    """Rows of different length, padded with NaN, and their mask."""
    width = max(map(len, rows))
    padded = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    return padded, torch.tensor([[i < len(row) for i in range(width)] for row in rows])


def assert_close(got: Tensor | float, want: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want, dtype=torch.float32), atol=1e-5, rtol=1e-5)


def assert_outcome(name: str, case: dict[str, Any], key: str = "advantages", **extra: Any) -> None:
    options = {k: case[k] for k in ("gamma", "lam", "whiten", "kl_coef") if k in case}
    options |= {k: tensor(case[k]) for k in ("values", "bootstrap", "kl") if k in case}
    mask = torch.tensor(case["mask"]) if "mask" in case else torch.ones(len(case["rewards"]), 1)
    got = T.compute_advantages(name, tensor(case["rewards"]), mask, **(options | extra))
    assert_close(got.advantages if "mask" in case else got.advantages[:, 0], case[key])
    if "returns" in case:
        assert_close(got.returns, case["returns"])


def test_gae_observation_tokens() -> None:
    case = FIXED["gae_observation_tokens"]
    assert_outcome("gae", case)
    values = tensor(case["values"])
    values[values == 7] = math.nan
    assert_outcome("gae", case, values=values)


def test_gae_with_300_observation_tokens_instead_of_3() -> None:
    case = FIXED["gae_observation_tokens"]

    def stretch(row: Tensor, fill: float) -> Tensor:
        return torch.cat([row[:, :2], torch.full((1, 300), fill), row[:, 5:]], dim=1)

    mask = stretch(tensor(case["mask"]), 0.0)
    options = {"gamma": 0.9, "lam": 0.8, "whiten": False}
    got = T.compute_advantages("gae", tensor([1.0]), mask, values=stretch(tensor(case["values"]), 7.0), **options)
    assert_close(got.advantages, stretch(tensor(case["advantages"]), 0.0))
    assert_close(got.returns, stretch(tensor(case["returns"]), 0.0))


def test_gae_bootstrap() -> None:
    assert_outcome("gae", FIXED["gae_bootstrap"])


def test_reinforce_across_observation() -> None:
    assert_outcome("reinforce", FIXED["reinforce_across_observation"])


def test_reinforce_kl_gated() -> None:
    assert_outcome("reinforce", FIXED["reinforce_kl_gated"])


def test_whiten() -> None:
    case = FIXED["whiten"]
    assert_close(T.whiten(tensor(case["x"]), torch.tensor(case["mask"])), case["out"])
    equal = case["equal_float32"]
    x = torch.full((1, equal["n"]), equal["value"])
    assert T.whiten(x, torch.ones_like(x)).abs().max() == equal["out"]


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "grpo"])
def test_no_verdict(name: str) -> None:
    case = FIXED["no_verdict"]
    assert_outcome(name, case, name, group_ids=torch.tensor(case["group"]))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_equal_rewards(name: str) -> None:
    assert_outcome(name, FIXED["equal_rewards"], name)


def test_rloo() -> None:
    assert_outcome("rloo", FIXED["rloo"], "rloo")


def test_gspo() -> None:
    case = FIXED["gspo"]
    log_ratio, mask = ragged(case["log_ratio"])
    logp = torch.nan_to_num(log_ratio).requires_grad_()
    old = torch.where(mask, 0.0, math.nan)
    advantages = tensor(case["advantages"])[:, None].expand_as(logp)
    options = {"level": "sequence", "clip": tuple(case["clip"]), "aggregation": "sequence_mean"}
    loss, metrics = T.policy_loss(logp, old, advantages, mask, **options)
    loss.backward()
    assert_close(loss, case["loss"])
    assert logp.grad is not None
    assert_close(logp.grad[0, :2], case["grad_logp_row0"])
    assert_close(logp.grad[1], case["grad_logp_row1"])
    assert metrics["ratio"].value == pytest.approx((2 * case["s"][0] + 5 * case["s"][1]) / 7, abs=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, -500.0, -math.inf, math.inf, 1e30])
def test_masked_garbage(garbage: float) -> None:
    case = FIXED["masked_garbage"]
    logp = tensor(case["logp"]).requires_grad_()
    old = torch.nan_to_num(tensor(case["old_logp"]), nan=garbage)
    old[0, 1] = garbage
    loss = T.policy_loss(logp, old, tensor(case["advantages"]), torch.tensor(case["mask"]), clip=(0.2, 0.2)).loss
    loss.backward()
    assert_close(loss, case["loss"])
    assert logp.grad is not None
    assert_close(logp.grad, case["grad_logp"])


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_aggregate(mode: str) -> None:
    case = FIXED["aggregate"]
    assert_close(T.aggregate(*ragged(case["per_token"]), mode), case[mode])


def test_aggregate_constant() -> None:
    case = FIXED["aggregate_constant"]
    per_token, mask = ragged([[case["per_token"]] * n for n in case["lengths"]])
    assert_close(T.aggregate(per_token, mask, "constant", denominator=case["denominator"]), case["constant"])


def test_overlong_mask() -> None:
    case = FIXED["overlong_mask"]
    rows = [[value] * n for value, n in zip(case["per_token"], case["lengths"], strict=True)]
    per_token, mask = ragged(rows)
    mask = T.overlong_mask(mask, torch.tensor(case["truncated"]))
    assert_close(T.aggregate(per_token, mask), case["token_mean"])


def test_clip_objective() -> None:
    case = FIXED["clip_objective"]
    rows = [(row, None) for row in case["cases"]] + [(row, 3.0) for row in case["dual_clip_3"]]
    for (ratio, advantage, objective), dual in rows:
        logp = torch.tensor([[math.log(ratio)]])
        options = {"clip": tuple(case["clip"]), "dual_clip": dual}
        got = T.policy_loss(logp, torch.zeros(1, 1), torch.tensor([[float(advantage)]]), torch.ones(1, 1), **options)
        assert_close(got.loss, -objective)


def test_kl() -> None:
    case = FIXED["kl"]
    p, ref = tensor(case["p"]), tensor(case["ref"])
    for kind in ("k1", "k2", "k3"):
        assert_close((p * T.kl_estimate(p.log(), ref.log(), kind)).sum(), case[f"{kind}_mean"])


def test_kl_loss_has_the_gradient_of_reverse_kl() -> None:
    case = FIXED["kl"]
    p, ref = tensor(case["p"]), tensor(case["ref"]).log()[None]
    logits = p.log().requires_grad_()
    logp = torch.log_softmax(logits, 0)[None]
    token = torch.eye(3)
    loss = sum(p[i] * T.kl_loss(logp, ref, token[i : i + 1]).loss for i in range(3))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert_close(gradient, case["reverse_kl_grad_logits"])


def test_temperature() -> None:
    case = FIXED["temperature"]
    logits = tensor(case["logits"])
    assert_close(T.token_logprobs(logits.expand(3, 3), torch.arange(3), case["T"]), case["logprobs"])
    assert_close(T.entropy(logits), case["entropy_T1"])
    assert_close(T.entropy(logits, case["T"]), case["entropy_T05"])


@pytest.mark.parametrize(("clip", "key"), [(0.2, "clip_02"), (None, "no_clip")])
def test_value_loss(clip: float | None, key: str) -> None:
    case = FIXED["value_loss"]
    tensors = [tensor(case[name]) for name in ("values", "old_values", "returns")]
    assert_close(T.value_loss(*tensors, torch.tensor(case["mask"]), clip=clip).loss, case[key])


def test_dpo() -> None:
    case = FIXED["dpo"]
    pairs = [tensor(case[name]) for name in ("pi_c", "pi_r", "ref_c", "ref_r")]
    assert_close(T.dpo_loss(*pairs, beta=case["beta"]).loss, case["sigmoid"])
    assert_close(T.dpo_loss(*pairs, beta=case["beta"], label_smoothing=0.2).loss, case["label_smoothing_02"])
    assert_close(T.dpo_loss(*pairs, beta=case["beta"], kind="ipo").loss, case["ipo"])


def test_reward_model() -> None:
    case = FIXED["reward_model"]
    pair = tensor(case["chosen"]), tensor(case["rejected"])
    assert_close(T.reward_model_loss(*pair).loss, case["sigmoid"])
    assert_close(T.reward_model_loss(*pair, margin=tensor(case["margins"])).loss, case["with_margin"])


def test_overlong_penalty() -> None:
    case = FIXED["overlong_penalty"]
    options = {k: case[k] for k in ("max_new", "buffer", "factor")}
    assert_close(T.overlong_penalty(tensor(case["rewards"]), torch.tensor(case["lengths"]), **options), case["out"])


@pytest.mark.parametrize("case", FIXED["keep_group"])
def test_keep_group(case: dict[str, Any]) -> None:
    assert T.keep_group(case["scores"], case.get("low"), case.get("high")) is case["keep"]


def test_pass_at_k() -> None:
    case = FIXED["pass_at_k"]
    for k in (1, 3, 6):
        assert T.pass_at_k(case["n"], case["c"], k) == pytest.approx(case[f"k{k}"], abs=1e-5)


def test_planned_updates() -> None:
    case = dict(FIXED["planned_updates"])
    updates = case.pop("updates")
    assert T.planned_updates(**case) == updates


def test_every_fixed_case_has_a_test() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(FIXED) <= tests
