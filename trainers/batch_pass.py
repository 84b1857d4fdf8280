"""One batch on its way through a rank's optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trajectory import Row
from .backend import Backend, gather
from .batch import MicroBatch, Update
from .kl import kl_estimate
from .metrics import Mean, averages, measure, merge
from .models import Policy
from .objective import Decided, Objective, aligned, rollout_ids
from .packing import split_packs
from .pixels import PixelCache

_NAMES = {
    "loss": "policy/loss",
    "kl_old": "policy/kl_old",
    "clip_fraction": "policy/clip_fraction",
    "ratio": "policy/ratio",
    "entropy": "policy/entropy",
    "grad_norm": "policy/grad_norm",
    "correction_mean": "correction/mean",
    "correction_zeroed": "correction/zeroed",
    "mismatch_kl": "mismatch/kl",
}
"""Metrics of the parts -> names in the report. Means over trained tokens; loss and grad_norm: over updates made."""


@dataclass(frozen=True)
class Tools:
    """What a rank computes with. `pictures` is None for a text model; `always_look` as in `split_packs`."""

    policy: Policy
    pictures: PixelCache | None
    backend: Backend
    objective: Objective
    rank: int
    device: torch.device
    always_look: bool = False


class BatchPass:
    """The updates of one batch. `version` = the weights at its start: engine and trainer are compared on tokens of it."""

    def __init__(self, tools: Tools, rows: Sequence[Row], decided: Decided, version: int) -> None:
        self._tools = tools
        self._rows = rows
        self._rollouts = rollout_ids(rows)
        self._decided = decided
        self._current = aligned([torch.from_numpy(row.versions[row.loss_mask]) for row in rows]) == version
        self._old_logp: dict[int, Tensor] = {}
        self._parts: list[dict[str, Mean]] = []
        self._max_abs = 0.0
        self._moved = False

    @torch.no_grad()
    def recompute(self, updates: Sequence[Update]) -> None:
        """Log-probs of the weights at the start of the batch, for the rows this rank trains in these updates."""
        for rows in self._shares(updates):
            logp, _ = self._score(rows or self._filler)
            if rows:
                self._old_logp |= dict(zip(rows, logp, strict=True))
                self._compare(rows, aligned(logp))

    def make(self, update: Update, lr: float) -> float:
        """One optimizer update, its denominator known before the first backward; the gradient's norm.

        Not finite: the step was not made.
        """
        tools = self._tools
        rollouts = len({self._rollouts[row] for row in update.rows})
        denominator = tools.objective.denominator(self._decided.select(update.rows), rollouts)
        shares = list(self._shares([update]))
        for i, rows in enumerate(shares):
            loss = self._loss(rows, denominator)
            tools.backend.backward(loss, last=i == len(shares) - 1)
        norm = tools.backend.step(lr)
        if math.isfinite(norm):
            self._moved = True
            if tools.rank == 0:
                self._parts.append({"grad_norm": Mean(norm, 1.0), "loss": Mean(0.0, 1.0)})
        return norm

    def metrics(self) -> dict[str, float]:
        """Sums and counts over micro-batches and ranks, then divided. Every rank must ask."""
        every = gather((merge(self._parts), self._max_abs))
        merged = averages(merge([parts for parts, _ in every]))
        report = {_NAMES[name]: value for name, value in merged.items()}
        if "mismatch/kl" in report:
            report["mismatch/max_abs"] = max(largest for _, largest in every)
        return report

    def _shares(self, updates: Sequence[Update]) -> Iterator[MicroBatch]:
        return (step[self._tools.rank] for update in updates for step in update.steps)

    @property
    def _filler(self) -> MicroBatch:
        """What a rank with nothing to do computes, without weight, to keep its collectives in step with the others'."""
        used = torch.nonzero(self._decided.mask.any(1)).flatten().tolist()
        return (min(used, key=lambda row: len(self._rows[row])),)

    def _loss(self, rows: MicroBatch, denominator: float) -> Tensor:
        """The share of the update's loss that some rows have."""
        objective = self._tools.objective
        decided = self._decided.select(rows or self._filler)
        decided = (decided if rows else decided.without_weight()).to(self._tools.device)
        by_row, entropy_by_row = self._score(rows or self._filler)
        logp, entropy = aligned(by_row), aligned(entropy_by_row)
        if rows and not self._moved and not self._old_logp:
            self._compare(rows, logp.detach())
        loss = objective.loss(logp, self._old(rows, logp, decided), entropy, decided, denominator)
        self._parts += [loss.metrics, measure({"entropy": entropy}, decided.mask)]
        self._parts.append({"loss": Mean(float(loss.loss.detach()), 0.0)})
        return loss.loss

    def _old(self, rows: MicroBatch, logp: Tensor, decided: Decided) -> Tensor:
        """Log-probs of the proximal policy."""
        source = self._tools.objective.old_logp
        if source == "rollout":
            return decided.rollout_logp
        if source == "current" or not rows:
            return logp.detach()
        return aligned([self._old_logp[row] for row in rows])

    def _score(self, rows: MicroBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and entropies of the trained tokens of each row."""
        tools = self._tools
        own = [self._rows[row] for row in rows]
        packs = split_packs(own, tools.policy, tools.pictures, always_look=tools.always_look)
        logp, entropy = tools.backend([pack.to(tools.device) for pack in packs])
        counts = [count for pack in packs for count in pack.counts]
        return list(logp.split(counts))[: len(rows)], list(entropy.split(counts))[: len(rows)]

    def _compare(self, rows: MicroBatch, logp: Tensor) -> None:
        """The trainer's log-probs [B, L] against those the engine gave, where both are of the same weights."""
        decided = self._decided.select(rows)
        same = decided.mask & self._current[torch.as_tensor(rows), : decided.mask.shape[1]]
        engine = torch.where(same, decided.rollout_logp, 0.0)
        ours = torch.where(same, logp.cpu()[:, : same.shape[1]], 0.0)
        self._parts.append(measure({"mismatch_kl": kl_estimate(engine, ours, "k3")}, same))
        if bool(same.any()):
            self._max_abs = max(self._max_abs, float((engine - ours).abs().max()))
