"""What must not change a result: masked content, padding, the order of rollouts, the cut into micro-batches
and over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from agentrl.trainers import (
    PRESETS,
    Advantages,
    Preset,
    aggregate,
    compute_advantages,
    kl_loss,
    policy_loss,
    value_loss,
)
from agentrl.trainers.batch import plan_updates
from agentrl.trainers.estimators import find_estimator
from agentrl.trainers.objective import Objective
from agentrl.trainers.scoring import Scores
from agentrl.trainers.slots import aligned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl import Row
from agentrl.config import Config

torch.set_num_threads(1)
CORRECTIONS = (None, "tis", "icepop", "seq_mask_tis", "decoupled")
MODES = ("token_mean", "sequence_mean", "constant")
CONSTANT = 50.0
KL_COEF = 0.1
OBJECTIVES = {
    preset.name: Objective.of(
        Config.model_validate({"algo": {"name": preset.name, "kl": {"coef": 1.0, "where": "loss"}}})
    )
    for preset in PRESETS
}
everywhere = pytest.mark.parametrize("mode", MODES)
algorithms = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
few = settings(max_examples=10, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Options:
    """What may be chosen with every algorithm, or with some (dual clip: trust "clip"; rewards of turns: by_turn)."""

    correction: str | None
    correction_level: str
    dual_clip: float | None
    entropy_coef: float
    by_turn: bool


OPTIONS = st.builds(
    Options,
    st.sampled_from(CORRECTIONS),
    st.sampled_from(("token", "sequence")),
    st.sampled_from((None, 1.1)),
    st.sampled_from((0.0, 0.3)),
    st.booleans(),
)


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
    entropy: Tensor
    turns: Tensor
    rewards: Tensor
    bootstrap: Tensor
    rollout: Tensor
    group: Tensor

    def take(self, rows: Tensor) -> Batch:
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def by_token(self) -> dict[str, Tensor]:
        names = ("values", "kl", "logp", "old", "behaviour", "reference", "entropy", "turns")
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
        entropy=torch.rand(shape, generator=generator),
        turns=torch.randint(-1, 2, shape, generator=generator) / 3,
        rewards=rewards[rollout],
        bootstrap=torch.randn(shape[0], generator=generator),
        rollout=rollout,
        group=group[rollout],
    )


def run(batch: Batch, preset: Preset, mode: str, options: Options) -> Result:
    """Advantages, the sum of all losses, and the gradient by logp and values together."""
    advantages, returns, valid = compute_advantages(
        preset.name,
        batch.rewards,
        batch.mask,
        group_ids=batch.group,
        rollout_ids=batch.rollout,
        values=batch.values,
        bootstrap=batch.bootstrap,
        token_rewards=batch.turns if options.by_turn and find_estimator(preset.advantage).by_turn else None,
        kl=batch.kl,
        kl_coef=0.1,
        gamma=0.95,
        lam=0.9,
    )
    trained = batch.mask & valid[:, None]
    divisor = {"token_mean": trained.sum(), "sequence_mean": batch.rollout[trained.any(1)].unique().numel()}
    denominator = float(divisor.get(mode, CONSTANT)) or 1.0
    loss, gradient = losses(batch, advantages, returns, trained, preset, mode, options, denominator)
    return Result(advantages, returns, valid, loss, gradient)


def losses(
    batch: Batch,
    advantages: Tensor,
    returns: Tensor,
    trained: Tensor,
    preset: Preset,
    mode: str,
    options: Options,
    denominator: float,
) -> tuple[Tensor, Tensor]:
    logp, values, entropy = (x.clone().requires_grad_() for x in (batch.logp, batch.values, batch.entropy))
    cut = {"denominator": denominator, "rollout_ids": batch.rollout, "aggregation": mode}
    policy = policy_loss(logp, batch.old, advantages, trained, **axes(preset, options, batch), **cut).loss
    value = value_loss(values, batch.values - 0.1, returns, trained, clip=0.2, denominator=denominator).loss
    total = policy + value + KL_COEF * kl_loss(logp, batch.reference, trained, **cut).loss
    bonus = aggregate(entropy, trained, mode, denominator=denominator, rollout_ids=batch.rollout)
    total = total - options.entropy_coef * bonus
    total.backward()
    assert logp.grad is not None and values.grad is not None and entropy.grad is not None
    return total.detach(), torch.stack([logp.grad, values.grad, entropy.grad])


def axes(preset: Preset, options: Options, batch: Batch) -> dict[str, Any]:
    """The choices of `policy_loss` that are the same in every cut."""
    return {
        "level": preset.level,
        "clip": preset.clip,
        "trust": preset.trust,
        "dual_clip": options.dual_clip if preset.trust == "clip" else None,
        "rollout_logp": batch.behaviour,
        "correction": options.correction,
        "correction_level": options.correction_level,
    }


def same(got: Result, want: Result) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@everywhere
@algorithms
@few
@given(batch=batches(), options=OPTIONS, garbage=st.sampled_from([torch.nan, torch.inf, 1e30]))
def test_masked_content(preset: Preset, mode: str, batch: Batch, options: Options, garbage: float) -> None:
    dirty = replace(batch, **{name: torch.where(batch.mask, x, garbage) for name, x in batch.by_token().items()})
    same(run(dirty, preset, mode, options), run(batch, preset, mode, options))


@everywhere
@algorithms
@few
@given(batch=batches(), options=OPTIONS, left=st.integers(0, 3), right=st.integers(0, 9))
def test_padding(preset: Preset, mode: str, batch: Batch, options: Options, left: int, right: int) -> None:
    def pad(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (left, right), value=fill)

    wide = replace(batch, **{name: pad(x, torch.nan) for name, x in batch.by_token().items()})
    wide = replace(wide, mask=pad(batch.mask.float(), 0.0).bool())
    got, want = run(wide, preset, mode, options), run(batch, preset, mode, options)
    inner = slice(left, left + batch.mask.shape[1])
    trimmed = Result(got.advantages[:, inner], got.returns[:, inner], got.valid, got.loss, got.gradient[..., inner])
    same(trimmed, want)
    assert got.gradient.isfinite().all()


@everywhere
@algorithms
@few
@given(batch=batches(), options=OPTIONS, seed=st.integers(0, 1000))
def test_order_of_rollouts(preset: Preset, mode: str, batch: Batch, options: Options, seed: int) -> None:
    shuffled = torch.randperm(int(batch.rollout.max()) + 1, generator=torch.Generator().manual_seed(seed))
    rows = torch.argsort(shuffled[batch.rollout], stable=True)
    got, want = run(batch.take(rows), preset, mode, options), run(batch, preset, mode, options)
    moved = Result(want.advantages[rows], want.returns[rows], want.valid[rows], want.loss, want.gradient[:, rows])
    same(got, moved)


@everywhere
@algorithms
@few
@given(batch=batches(), options=OPTIONS, size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_cut_into_micro_batches(
    preset: Preset, mode: str, batch: Batch, options: Options, size: int, seed: int
) -> None:
    whole = run(batch, preset, mode, options)
    trained = batch.mask & whole.valid[:, None]
    divisor = {"token_mean": trained.sum(), "sequence_mean": batch.rollout[trained.any(1)].unique().numel()}
    denominator = float(divisor.get(mode, CONSTANT)) or 1.0
    order = torch.randperm(int(batch.rollout.max()) + 1, generator=torch.Generator().manual_seed(seed))
    loss, gradient = torch.tensor(0.0), torch.zeros_like(whole.gradient)
    for part in order.split(size):
        rows = torch.isin(batch.rollout, part).nonzero()[:, 0]
        cut = (batch.take(rows), whole.advantages[rows], whole.returns[rows], trained[rows])
        piece, gradient[:, rows] = losses(*cut, preset, mode, options, denominator)
        loss = loss + piece
    torch.testing.assert_close(loss, whole.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, whole.gradient, atol=1e-6, rtol=1e-6)


@everywhere
@algorithms
@few
@given(
    batch=batches(),
    options=OPTIONS,
    ranks=st.integers(1, 3),
    budget=st.integers(6, 30),
    updates=st.integers(1, 2),
)
def test_cut_over_ranks(
    preset: Preset, mode: str, batch: Batch, options: Options, ranks: int, budget: int, updates: int
) -> None:
    """The way of the trainer: its objective on rows that go where the plan puts them, also those of one rollout, with their
    weights in the update. Summed over ranks and micro-steps, where some have nothing to do, each update is that of one pass
    over its rows.
    """
    whole = run(batch, preset, mode, options)
    objective = objective_of(preset, mode, options)
    rows, table = rows_of(batch), Slots(batch.mask)
    found = Advantages(table.pack(whole.advantages), table.pack(whole.returns), whole.valid)
    decided = objective.decide(rows, found, Scores(table.pack(batch.old), table.pack(batch.reference)), 0)
    plan = plan_updates(
        [row.rollout_id for row in rows],
        [len(row) for row in rows],
        decided.mask.any(1).tolist(),
        updates=updates,
        ranks=ranks,
        budget=budget,
    )
    for update in plan:
        if not update.rows:
            continue
        members = torch.tensor(update.rows)
        rollouts = len({rows[i].rollout_id for i in update.rows})
        denominator = objective.denominator(decided.select(update.rows), rollouts)
        want = in_one_pass(batch.take(members), whole, members, preset, mode, options)
        logp, entropy = table.pack(batch.logp).requires_grad_(), table.pack(batch.entropy).requires_grad_()
        loss = torch.tensor(0.0)
        for share in (share for step in update.steps for share in step):
            part = share or update.rows[:1]
            own = decided.share(part, bool(share), torch.device("cpu"))
            width = own.mask.shape[1]
            given = logp[list(part), :width], own.old_logp, entropy[list(part), :width]
            loss = loss + objective.loss(*given, own, denominator, KL_COEF).loss
        loss.backward()
        gradients = torch.stack([table.unpack(x.grad) for x in (logp, entropy)])
        torch.testing.assert_close(loss.detach(), want[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradients[:, members], want[1], atol=1e-6, rtol=1e-6)


def in_one_pass(
    batch: Batch, whole: Result, members: Tensor, preset: Preset, mode: str, options: Options
) -> tuple[Tensor, Tensor]:
    """Loss of an update's rows, and its gradient by logp and entropy, by the plain functions."""
    trained = batch.mask & whole.valid[members, None]
    rollouts = batch.rollout[trained.any(1)].unique().numel()
    cut: dict[str, Any] = {"aggregation": mode, "rollout_ids": batch.rollout}
    if mode == "constant":
        cut["denominator"] = rollouts * OBJECTIVES[preset.name].shaping.longest
    logp, entropy = batch.logp.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    given = logp, batch.old, whole.advantages[members], trained
    loss = policy_loss(*given, **axes(preset, options, batch), **cut).loss
    loss = loss + KL_COEF * kl_loss(logp, batch.reference, trained, **cut).loss
    ways = {"mode": mode, "rollout_ids": batch.rollout, "denominator": cut.get("denominator")}
    loss = loss - options.entropy_coef * aggregate(entropy, trained, **ways)
    loss.backward()
    assert logp.grad is not None and entropy.grad is not None
    return loss.detach(), torch.stack([logp.grad, entropy.grad])


def objective_of(preset: Preset, mode: str, options: Options) -> Objective:
    return replace(
        OBJECTIVES[preset.name],
        aggregation=mode,
        correction=options.correction or "none",
        correction_level=options.correction_level,
        dual_clip=options.dual_clip if preset.trust == "clip" else None,
        entropy_coef=options.entropy_coef,
        old_logp="recompute",
    )


def rows_of(batch: Batch) -> list[Row]:
    """The rows whose trained tokens stand where the mask is true."""
    rows = []
    for i, mask in enumerate(batch.mask):
        reward = float(batch.rewards[i])
        row = Row(
            token_ids=np.zeros(len(mask), np.int32),
            loss_mask=mask.numpy(),
            logprobs=batch.behaviour[i].numpy(),
            versions=np.zeros(len(mask), np.int32),
            rewards=np.zeros(len(mask), np.float32),
            rollout_id=f"{int(batch.rollout[i])}",
            group_id=f"{int(batch.group[i])}",
            total_reward=None if math.isnan(reward) else reward,
        )
        rows.append(row)
    return rows


class Slots:
    """Between tokens [B, T] and the trainer's table of trained tokens, left-aligned [B, L]."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def pack(self, tokens: Tensor) -> Tensor:
        return aligned([row[mask] for row, mask in zip(tokens, self._mask, strict=True)])

    def unpack(self, table: Tensor | None) -> Tensor:
        """None = a gradient of nothing: 0 everywhere."""
        tokens = torch.zeros(self._mask.shape)
        for row, values, mask in zip(
            tokens, torch.zeros_like(tokens) if table is None else table, self._mask, strict=True
        ):
            row[mask] = values[: int(mask.sum())]
        return tokens
