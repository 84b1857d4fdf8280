"""What must not change a result: masked content, padding, the order of rollouts, the cut into micro-batches
and over ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from agentrl.trainers import PRESETS, Preset, compute_advantages, kl_loss, policy_loss, token_weights, value_loss
from agentrl.trainers.batch import plan_updates
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

torch.set_num_threads(1)
CORRECTIONS = (None, "tis", "icepop", "seq_mask_tis", "decoupled")
MODES = ("token_mean", "sequence_mean", "constant")
CONSTANT = 50.0
everywhere = pytest.mark.parametrize("mode", MODES)
algorithms = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
few = settings(max_examples=10, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Batch:
    """Rows of a batch: float32[B, T] by token, [B] by row."""

    mask: Tensor
    values: Tensor
    kl: Tensor
    logp: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    rewards: Tensor
    bootstrap: Tensor
    rollout: Tensor
    group: Tensor

    def take(self, rows: Tensor) -> Batch:
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def by_token(self) -> dict[str, Tensor]:
        names = ("values", "kl", "logp", "old", "behaviour", "reference")
        return {name: getattr(self, name) for name in names}


class Result(NamedTuple):
    advantages: Tensor
    returns: Tensor
    valid: Tensor
    loss: Tensor
    gradient: Tensor


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    group = torch.tensor([g for g, count in enumerate(members) for _ in range(count)])
    rows_of = torch.randint(1, 3, (len(group),), generator=generator)
    rollout = torch.arange(len(group)).repeat_interleave(rows_of)
    shape = (len(rollout), draw(st.integers(1, 6)))
    rewards = torch.randint(-3, 4, (len(group),), generator=generator) / 3
    rewards[torch.rand(len(group), generator=generator) < 0.15] = torch.nan
    old = -torch.rand(shape, generator=generator)

    def near(x: Tensor) -> Tensor:
        return x + 0.4 * torch.randn(shape, generator=generator)

    return Batch(
        mask=torch.rand(shape, generator=generator) < 0.6,
        values=torch.randn(shape, generator=generator),
        kl=torch.rand(shape, generator=generator),
        logp=near(old),
        old=old,
        behaviour=near(old),
        reference=near(old),
        rewards=rewards[rollout],
        bootstrap=torch.randn(shape[0], generator=generator),
        rollout=rollout,
        group=group[rollout],
    )


def run(batch: Batch, preset: Preset, mode: str, correction: str | None) -> Result:
    """Advantages, the sum of all losses, and the gradient by logp and values together."""
    advantages, returns, valid = compute_advantages(
        preset.name,
        batch.rewards,
        batch.mask,
        group_ids=batch.group,
        rollout_ids=batch.rollout,
        values=batch.values,
        bootstrap=batch.bootstrap,
        kl=batch.kl,
        kl_coef=0.1,
        gamma=0.95,
        lam=0.9,
    )
    trained = batch.mask & valid[:, None]
    divisor = {"token_mean": trained.sum(), "sequence_mean": batch.rollout[trained.any(1)].unique().numel()}
    denominator = float(divisor.get(mode, CONSTANT)) or 1.0
    loss, gradient = losses(batch, advantages, returns, trained, preset, mode, correction, denominator)
    return Result(advantages, returns, valid, loss, gradient)


def losses(
    batch: Batch,
    advantages: Tensor,
    returns: Tensor,
    trained: Tensor,
    preset: Preset,
    mode: str,
    correction: str | None,
    denominator: float,
) -> tuple[Tensor, Tensor]:
    logp, values = batch.logp.clone().requires_grad_(), batch.values.clone().requires_grad_()
    cut = {"denominator": denominator, "rollout_ids": batch.rollout, "aggregation": mode}
    axes = {"level": preset.level, "clip": preset.clip, "trust": preset.trust}
    behaviour = {"rollout_logp": batch.behaviour, "correction": correction, "correction_level": preset.level}
    policy = policy_loss(logp, batch.old, advantages, trained, **axes, **behaviour, **cut).loss
    value = value_loss(values, batch.values - 0.1, returns, trained, clip=0.2, denominator=denominator).loss
    total = policy + value + 0.1 * kl_loss(logp, batch.reference, trained, **cut).loss
    total.backward()
    assert logp.grad is not None and values.grad is not None
    return total.detach(), torch.stack([logp.grad, values.grad])


def same(got: Result, want: Result) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@everywhere
@algorithms
@few
@given(batch=batches(), correction=st.sampled_from(CORRECTIONS), garbage=st.sampled_from([torch.nan, torch.inf, 1e30]))
def test_masked_content(preset: Preset, mode: str, batch: Batch, correction: str | None, garbage: float) -> None:
    dirty = replace(batch, **{name: torch.where(batch.mask, x, garbage) for name, x in batch.by_token().items()})
    same(run(dirty, preset, mode, correction), run(batch, preset, mode, correction))


@everywhere
@algorithms
@few
@given(batch=batches(), correction=st.sampled_from(CORRECTIONS), left=st.integers(0, 3), right=st.integers(0, 9))
def test_padding(preset: Preset, mode: str, batch: Batch, correction: str | None, left: int, right: int) -> None:
    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=fill)

    wide = replace(batch, **{name: pad(x, torch.nan) for name, x in batch.by_token().items()})
    wide = replace(wide, mask=pad(batch.mask.float(), 0.0).bool())
    got, want = run(wide, preset, mode, correction), run(batch, preset, mode, correction)
    inner = slice(left, left + batch.mask.shape[1])
    trimmed = Result(got.advantages[:, inner], got.returns[:, inner], got.valid, got.loss, got.gradient[..., inner])
    same(trimmed, want)
    assert got.gradient.isfinite().all()


@everywhere
@algorithms
@few
@given(batch=batches(), correction=st.sampled_from(CORRECTIONS), seed=st.integers(0, 1000))
def test_order_of_rollouts(preset: Preset, mode: str, batch: Batch, correction: str | None, seed: int) -> None:
    shuffled = torch.randperm(int(batch.rollout.max()) + 1, generator=torch.Generator().manual_seed(seed))
    rows = torch.argsort(shuffled[batch.rollout], stable=True)
    got, want = run(batch.take(rows), preset, mode, correction), run(batch, preset, mode, correction)
    moved = Result(want.advantages[rows], want.returns[rows], want.valid[rows], want.loss, want.gradient[:, rows])
    same(got, moved)


@everywhere
@algorithms
@few
@given(
    batch=batches(), correction=st.sampled_from(CORRECTIONS), size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99)
)
def test_cut_into_micro_batches(
    preset: Preset, mode: str, batch: Batch, correction: str | None, size: int, seed: int
) -> None:
    whole = run(batch, preset, mode, correction)
    trained = batch.mask & whole.valid[:, None]
    divisor = {"token_mean": trained.sum(), "sequence_mean": batch.rollout[trained.any(1)].unique().numel()}
    denominator = float(divisor.get(mode, CONSTANT)) or 1.0
    order = torch.randperm(int(batch.rollout.max()) + 1, generator=torch.Generator().manual_seed(seed))
    loss, gradient = torch.tensor(0.0), torch.zeros_like(whole.gradient)
    for part in order.split(size):
        rows = torch.isin(batch.rollout, part).nonzero()[:, 0]
        cut = (batch.take(rows), whole.advantages[rows], whole.returns[rows], trained[rows])
        piece, gradient[:, rows] = losses(*cut, preset, mode, correction, denominator)
        loss = loss + piece
    torch.testing.assert_close(loss, whole.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, whole.gradient, atol=1e-6, rtol=1e-6)


@everywhere
@algorithms
@few
@given(
    batch=batches(),
    correction=st.sampled_from(CORRECTIONS),
    ranks=st.integers(1, 3),
    budget=st.integers(6, 30),
    updates=st.integers(1, 2),
)
def test_cut_over_ranks(
    preset: Preset, mode: str, batch: Batch, correction: str | None, ranks: int, budget: int, updates: int
) -> None:
    """The way of the trainer: rows, also those of one rollout, go where the plan puts them, with their weights in the
    update. Summed over ranks and micro-steps, where some have nothing to do, each update is that of one pass over its rows.
    """
    whole = run(batch, preset, mode, correction)
    trained = batch.mask & whole.valid[:, None]
    axes = {"level": preset.level, "clip": preset.clip, "trust": preset.trust, "correction": correction}

    def policy(rows: Tensor, advantages: Tensor, mask: Tensor, **cut: Any) -> tuple[Tensor, Tensor]:
        logp = batch.logp[rows].clone().requires_grad_()
        given = (logp, batch.old[rows], advantages[rows], mask[rows])
        loss = policy_loss(*given, rollout_logp=batch.behaviour[rows], **axes, **cut).loss
        loss.backward()
        assert logp.grad is not None
        return loss.detach(), logp.grad

    lengths = [batch.mask.shape[1]] * len(batch.mask)
    plan = plan_updates(
        batch.rollout.tolist(), lengths, trained.any(1).tolist(), updates=updates, ranks=ranks, budget=budget
    )
    for update in plan:
        rows = torch.tensor(update.rows, dtype=torch.long)
        inside = torch.zeros(len(trained), 1, dtype=torch.bool).index_fill(0, rows, True) & trained
        divisor = {"token_mean": inside.sum(), "sequence_mean": batch.rollout[inside.any(1)].unique().numel()}
        denominator = float(divisor.get(mode, CONSTANT)) or 1.0
        aggregated = {"aggregation": mode, "denominator": denominator, "rollout_ids": batch.rollout[rows]}
        want, want_gradient = policy(rows, whole.advantages, trained, **aggregated)
        weights = token_weights(inside, mode, denominator=1.0, rollout_ids=batch.rollout)
        loss, gradient = torch.tensor(0.0), torch.zeros_like(batch.logp)
        for step in update.steps:
            for share in step:
                part = torch.tensor(share or update.rows[:1], dtype=torch.long)
                mask = trained if share else torch.zeros_like(trained)
                constant = {"aggregation": "constant", "denominator": denominator}
                piece, gradient_part = policy(part, whole.advantages * weights, mask, **constant)
                loss, gradient = loss + piece, gradient.index_add(0, part, gradient_part)
        torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient[rows], want_gradient, atol=1e-6, rtol=1e-6)
