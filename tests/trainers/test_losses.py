"""The conventions of policy_loss, value_loss and aggregate, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentrl.trainers import (
    Mean,
    aggregate,
    correction_weights,
    dpo_loss,
    kl_estimate,
    kl_loss,
    policy_loss,
    reward_model_loss,
    token_logprobs,
    value_loss,
    whiten,
)
from torch import Tensor

from .one_token import single

torch.set_num_threads(1)
NAN = math.nan
GARBAGE = (NAN, math.inf, -math.inf, 1e30)
MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]]).bool()


def assert_close(got: Tensor | None, want: Any, atol: float = 1e-6) -> None:
    assert got is not None
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float32), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("trust", ["clip", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", [None, "tis", "icepop", "seq_mask_tis", "decoupled"])
def test_masked_slots_change_neither_value_nor_gradient(
    garbage: float, trust: str, level: str, correction: str | None
) -> None:
    torch.manual_seed(0)
    clean = [-torch.rand(2, 4) for _ in range(4)]

    def run(fill: float | None) -> tuple[Tensor, Tensor | None, Any]:
        logp, old, rollout, adv = (x if fill is None else torch.where(MASK, x, fill) for x in clean)
        logp = logp.clone().requires_grad_()
        options = {"correction": correction, "correction_level": level, "rollout_logp": rollout}
        loss, metrics = policy_loss(logp, old, adv, MASK, level=level, trust=trust, **options)
        loss.backward()
        return loss, logp.grad, metrics

    for got, want in zip(run(garbage), run(None), strict=True):
        assert got == want if isinstance(got, dict) else torch.equal(got, want)


def test_the_gradient_is_minus_ratio_times_advantage_inside_the_clip() -> None:
    torch.manual_seed(1)
    old, advantages = -torch.rand(2, 4), torch.randn(2, 4)
    logp = (old + 0.5 * torch.randn(2, 4)).requires_grad_()
    policy_loss(logp, old, advantages, MASK).loss.backward()
    ratio = (logp - old).exp().detach()
    outside = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    assert outside[MASK].any() and not outside[MASK].all()
    assert_close(logp.grad, torch.where(MASK & ~outside, -ratio * advantages, 0.0) / MASK.sum())


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    logp = (-torch.rand(2, 4)).requires_grad_()
    advantages = torch.randn(2, 4)
    policy_loss(logp, logp, advantages, MASK).loss.backward()
    assert_close(logp.grad, torch.where(MASK, -advantages, 0.0) / 5)


def test_the_ratio_is_clamped_before_exp() -> None:
    loss, gradient = single(500.0, -1.0)
    assert loss == pytest.approx(math.exp(20.0)) and gradient == 0
    assert single(-math.inf, -1.0) == (pytest.approx(0.8), 0.0)


def test_clip_binds_on_the_side_that_gains() -> None:
    assert single(math.log(1.5), 1.0) == (pytest.approx(-1.2), 0.0)
    assert single(math.log(0.5), 1.0) == (pytest.approx(-0.5), pytest.approx(-0.5))
    assert single(math.log(0.5), -1.0) == (pytest.approx(0.8), 0.0)
    assert single(math.log(1.5), -1.0) == (pytest.approx(1.5), pytest.approx(1.5))


def test_dual_clip_bounds_negative_advantages_only() -> None:
    assert single(math.log(5.0), -1.0, dual_clip=3.0) == (pytest.approx(3.0), 0.0)
    assert single(math.log(2.0), -1.0, dual_clip=3.0) == (pytest.approx(2.0), pytest.approx(2.0))
    assert single(math.log(5.0), 1.0, dual_clip=3.0) == (pytest.approx(-1.2), 0.0)


def test_sequence_level_is_one_ratio_per_row_clipped_per_row() -> None:
    log_ratio = torch.tensor([[0.5, NAN, -0.1, 0.2], [NAN, 0.01, 0.03, NAN]])
    advantages = torch.ones(2, 4)
    logp = log_ratio.nan_to_num(0.0).requires_grad_()
    loss, metrics = policy_loss(logp, torch.zeros(2, 4), advantages, MASK, level="sequence", clip=(0.1, 0.1))
    loss.backward()
    s = math.exp(0.02)
    assert_close(loss, -(3 * 1.1 + 2 * s) / 5)
    assert_close(logp.grad, [[0, 0, 0, 0], [0, -s / 5, -s / 5, 0]])
    assert metrics["clip_fraction"] == Mean(3, 5)


def test_the_rows_of_a_rollout_have_ratios_of_their_own() -> None:
    logp = torch.tensor([[0.1], [0.0]])
    ids = {"aggregation": "sequence_mean", "rollout_ids": [0, 0]}
    loss = policy_loss(logp, torch.zeros(2, 1), torch.ones(2, 1), torch.ones(2, 1), level="sequence", **ids).loss
    assert_close(loss, -(math.exp(0.1) + 1) / 2)


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    for ratio, weight in ((3.0, 1.28), (1.1, 1.1), (0.001, 0.001)):
        logp = math.log(ratio)
        loss, gradient = single(logp, 2.0, trust="cispo", clip=(1.0, 0.28))
        assert gradient == pytest.approx(-2.0 * weight)
        assert loss == pytest.approx(-2.0 * weight * logp)


def test_advantages_old_and_rollout_carry_no_gradient() -> None:
    tensors = [(-torch.rand(2, 4)).requires_grad_() for _ in range(4)]
    logp, old, advantages, rollout = tensors
    policy_loss(logp, old, advantages, MASK, rollout_logp=rollout, correction="tis").loss.backward()
    assert logp.grad is not None
    assert old.grad is None and advantages.grad is None and rollout.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {"clip": (-0.1, 0.2)},
        {"clip": (0.2, -0.1)},
        {"clip": (1.0, 0.2)},
        {"clip": (1.5, 0.2), "trust": "cispo"},
        {"clip": (NAN, 0.2)},
        {"dual_clip": 1.0},
        {"dual_clip": 3.0, "trust": "cispo"},
        {"level": "row"},
        {"trust": "kl"},
        {"aggregation": "mean"},
        {"aggregation": "constant"},
        {"denominator": 0.0},
        {"correction": "tis"},
        {"correction": "other", "rollout_logp": torch.zeros(1, 1)},
        {"correction": "tis", "rollout_logp": torch.zeros(1, 1), "correction_level": "row"},
        {"correction": "tis", "rollout_logp": torch.zeros(1, 1), "correction_range": (2.0, 1.0)},
    ],
    ids=str,
)
def test_choices_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        single(0.0, **options)


def test_a_misspelt_choice_is_answered_with_the_nearest() -> None:
    for options, right in (
        ({"aggregation": "token_means"}, "token_mean"),
        ({"level": "tokn"}, "token"),
        ({"trust": "clipp"}, "clip"),
        ({"correction": "icepops", "rollout_logp": torch.zeros(1, 1)}, "icepop"),
    ):
        with pytest.raises(ValueError, match=f"Did you mean .*{right}"):
            single(0.0, **options)


def test_correction_none_by_name_is_no_correction() -> None:
    assert single(0.1, correction="none") == single(0.1)


WEIGHTS = [
    ("tis", None, [0.1, 1.0, 2.0, 2.0]),
    ("tis", (0.5, 1.5), [0.5, 1.0, 1.5, 1.5]),
    ("icepop", None, [0.0, 1.0, 3.0, 0.0]),
    ("icepop", (0.05, 2.0), [0.1, 1.0, 0.0, 0.0]),
    ("decoupled", None, [0.1, 1.0, 3.0, 0.0]),
    ("decoupled", (0.0, 2.0), [0.1, 1.0, 0.0, 0.0]),
    ("seq_mask_tis", (0.5, 2.5), [0.1, 1.0, 2.5, 2.5]),
    ("seq_mask_tis", (0.5, 1.2), [0.0, 0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("kind", "limits", "want"), WEIGHTS)
def test_corrections_by_token(kind: str, limits: tuple[float, float] | None, want: list[float]) -> None:
    w = torch.tensor([[0.1, 1.0, 3.0, 8.0]])
    assert_close(correction_weights(w.log(), torch.zeros(1, 4), torch.ones(1, 4), kind, limits=limits), [want])


@pytest.mark.parametrize(("kind", "want"), [("tis", 1.25), ("icepop", 0.0), ("seq_mask_tis", 0.0), ("decoupled", 0.0)])
def test_corrections_by_sequence(kind: str, want: float) -> None:
    mask = torch.tensor([[1, 1, 0, 1]])
    log_w = torch.tensor([[0.5, 0.1, NAN, 0.3]])
    got = correction_weights(log_w, torch.zeros(1, 4), mask, kind, level="sequence", limits=(0.5, 1.25))
    assert_close(got, [[want, want, 1.0, want]])
    wide = correction_weights(log_w, torch.zeros(1, 4), mask, kind, level="sequence", limits=(0.0, 2.0))
    assert_close(wide[mask.bool()], [math.exp(0.3)] * 3)


def test_sequence_correction_does_not_explode_with_length() -> None:
    log_w = torch.full((1, 512), 0.02)
    for kind in ("tis", "icepop", "seq_mask_tis", "decoupled"):
        got = correction_weights(log_w, torch.zeros(1, 512), torch.ones(1, 512), kind, level="sequence")
        assert_close(got, torch.full((1, 512), 1.020201))


def test_seq_mask_tis_masks_the_row_and_the_metric_shows_the_share() -> None:
    old = torch.tensor([[2.0] * 4, [0.02] * 4])
    mask, zeros = torch.ones(2, 4), torch.zeros(2, 4)
    _, metrics = policy_loss(old, old, torch.ones(2, 4), mask, rollout_logp=zeros, correction="seq_mask_tis")
    assert metrics["correction_zeroed"] == Mean(4, 8)
    assert metrics["correction_mean"].value == pytest.approx(math.exp(0.02) / 2)


def test_zero_weights_leave_the_denominator_alone() -> None:
    old = torch.tensor([[0.0, 3.0]])
    loss = policy_loss(
        old, old, torch.ones(1, 2), torch.ones(1, 2), rollout_logp=torch.zeros(1, 2), correction="icepop"
    )
    assert_close(loss.loss, -0.5)


@pytest.mark.parametrize("rollout", [math.inf, -math.inf, -1e30])
def test_corrections_stay_finite(rollout: float) -> None:
    for kind in ("tis", "icepop", "seq_mask_tis", "decoupled"):
        for level in ("token", "sequence"):
            got = correction_weights(torch.zeros(1, 1), torch.tensor([[rollout]]), torch.ones(1, 1), kind, level=level)
            assert got.isfinite().all()


def test_sequence_mean_is_over_the_tokens_of_a_rollout_then_over_rollouts() -> None:
    per_token = torch.tensor([[1.0, 2.0], [3.0, NAN], [10.0, NAN], [NAN, NAN]])
    mask = ~per_token.isnan()
    assert_close(aggregate(per_token, mask, "sequence_mean", rollout_ids=["a", "a", "b", "c"]), (2.0 + 10.0) / 2)
    assert_close(aggregate(per_token, mask, "sequence_mean"), (1.5 + 3.0 + 10.0) / 3)


@pytest.mark.parametrize(("mode", "want"), [("token_mean", 1.6), ("sequence_mean", 1.45), ("constant", 1.6)])
def test_the_denominator_is_the_final_divisor(mode: str, want: float) -> None:
    per_token = torch.tensor([[1.0, 2.0], [3.0, NAN], [10.0, NAN]])
    for denominator in (10.0, torch.tensor(10.0)):
        assert_close(aggregate(per_token, ~per_token.isnan(), mode, denominator=denominator), want)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_nothing_trained_is_zero_with_a_graph(mode: str) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        logp = torch.full(shape, NAN, requires_grad=True)
        nothing = torch.zeros(shape)
        loss, metrics = policy_loss(logp, logp, logp, nothing, aggregation=mode, denominator=4.0)
        loss.backward()
        assert loss.item() == 0 and metrics == {}
        assert_close(logp.grad, nothing)
    assert aggregate(torch.full((2, 3), NAN), torch.zeros(2, 3)).item() == 0


def test_per_token_gradient_at_masked_slots_is_zero() -> None:
    x = torch.tensor([[1.0, NAN]], requires_grad=True)
    aggregate(x, torch.tensor([[1, 0]])).backward()
    assert_close(x.grad, [[1.0, 0.0]])


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_never_reads_masked_slots(garbage: float, clip: float | None) -> None:
    torch.manual_seed(2)
    clean = [torch.randn(2, 4) for _ in range(3)]
    results = []
    for tensors in (clean, [torch.where(MASK, x, garbage) for x in clean]):
        values = tensors[0].clone().requires_grad_()
        loss = value_loss(values, tensors[1], tensors[2], MASK, clip=clip).loss
        loss.backward()
        results.append((loss, values.grad))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, atol=0)


def test_value_loss_gradient_stops_where_the_clipped_term_is_larger() -> None:
    values = torch.tensor([[0.5, 1.5]], requires_grad=True)
    loss, metrics = value_loss(values, torch.zeros(1, 2), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2), clip=0.2)
    loss.backward()
    assert_close(loss, 0.5 * (0.8**2 + 0.8**2) / 2)
    assert_close(values.grad, [[0.0, 0.0]])
    assert metrics["value_clip_fraction"] == Mean(2, 2)


def test_value_loss_without_clip_needs_no_old_values() -> None:
    values = torch.tensor([[0.5, NAN]], requires_grad=True)
    loss = value_loss(values, None, torch.ones(1, 2), torch.tensor([[1, 0]]), denominator=4.0).loss
    loss.backward()
    assert_close(loss, 0.5 * 0.25 / 4)
    assert_close(values.grad, [[-0.5 / 4, 0.0]])
    with pytest.raises(ValueError):
        value_loss(values, None, torch.ones(1, 2), torch.ones(1, 2), clip=0.2)


def test_kl_estimates_are_clamped_at_20() -> None:
    logp, ref = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    assert_close(kl_estimate(logp, ref, "k1"), [20.0, -20.0])
    assert_close(kl_estimate(logp, ref, "k2"), [200.0, 200.0])
    assert_close(kl_estimate(logp, ref, "k3"), [19.0, math.exp(20) - 21])
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(logp, ref, "k4")


@pytest.mark.parametrize("garbage", GARBAGE)
def test_kl_loss_gradient_is_d_at_trained_tokens_and_zero_elsewhere(garbage: float) -> None:
    torch.manual_seed(3)
    values, ref = torch.randn(2, 4), torch.randn(2, 4)
    logp = torch.where(MASK, values, garbage).requires_grad_()
    loss, metrics = kl_loss(logp, torch.where(MASK, ref, garbage), MASK)
    loss.backward()
    assert_close(logp.grad, torch.where(MASK, values - ref, 0.0) / 5)
    assert metrics["kl_ref"].count == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_losses_are_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    tensors = [(-torch.rand(2, 4)).to(dtype) for _ in range(3)]
    logp = tensors[0].clone().requires_grad_()
    got = policy_loss(logp, *tensors[1:], MASK).loss
    want = policy_loss(*(x.float() for x in tensors), MASK).loss
    got.backward()
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert logp.grad is not None and logp.grad.dtype == dtype
    assert value_loss(*tensors, MASK, clip=0.2).loss.dtype == torch.float32
    assert kl_estimate(*tensors[:2]).dtype == torch.float32


TABLE, PAIRS = torch.zeros(2, 3), torch.zeros(2)
GIVEN: list[tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]] = [
    (
        policy_loss,
        {"logp": TABLE, "old_logp": TABLE, "advantages": TABLE, "mask": TABLE, "rollout_logp": TABLE},
        {"correction": "tis"},
    ),
    (value_loss, {"values": TABLE, "old_values": TABLE, "returns": TABLE, "mask": TABLE}, {"clip": 0.2}),
    (kl_estimate, {"logp": TABLE, "ref_logp": TABLE}, {}),
    (kl_loss, {"logp": TABLE, "ref_logp": TABLE, "mask": TABLE}, {}),
    (aggregate, {"per_token": TABLE, "mask": TABLE}, {}),
    (correction_weights, {"old_logp": TABLE, "rollout_logp": TABLE, "mask": TABLE}, {"kind": "tis"}),
    (whiten, {"x": TABLE, "mask": TABLE}, {}),
    (token_logprobs, {"logits": TABLE, "token_ids": PAIRS}, {}),
    (dpo_loss, dict.fromkeys(("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected"), PAIRS), {}),
    (reward_model_loss, {"chosen": PAIRS, "rejected": PAIRS, "margin": PAIRS}, {}),
]


@pytest.mark.parametrize(("function", "tensors", "options"), GIVEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_tensor_that_would_have_to_be_broadcast_is_refused(
    function: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any]
) -> None:
    function(**tensors, **options)
    for name, tensor in tensors.items():
        with pytest.raises(ValueError, match=r"is \[.*\]; to go with the others it must be \["):
            function(**tensors | {name: tensor[:1]}, **options)
    assert reward_model_loss(PAIRS, PAIRS, margin=torch.tensor(1.0)).loss.item() == pytest.approx(math.log1p(math.e))
