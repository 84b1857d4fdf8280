"""One batch on its way through the policy's updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trajectory import Row
from .backend import Backend, gather
from .batch import MicroBatch, Update
from .decided import Decided
from .kl import kl_estimate
from .metrics import measure
from .objective import Objective
from .reading import Reader
from .slots import aligned, at_slots, rollout_ids
from .updating import LossShare, Parts, Updates

logger = logging.getLogger(__name__)
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
    "kl_ref": "kl/ref",
}
"""Metrics of the parts -> names in the report. Means over trained tokens; loss and grad_norm: over updates made."""


@dataclass(frozen=True)
class Tools:
    """What a rank trains the policy with."""

    reader: Reader
    backend: Backend
    objective: Objective
    rank: int

    @property
    def device(self) -> torch.device:
        return self.reader.device


class BatchPass:
    """The updates of one batch. `version` = the weights at its start: engine and trainer are compared on tokens of it."""

    who = "policy"

    def __init__(self, tools: Tools, rows: Sequence[Row], decided: Decided, version: int, kl_coef: float = 0.0) -> None:
        self._tools = tools
        self._rows = rows
        self._rollouts = rollout_ids(rows)
        self._decided = decided
        self._kl_coef = kl_coef
        self._current = at_slots([row.versions for row in rows], rows) == version
        self._updates = Updates(tools.backend, tools.rank, [len(row) for row in rows])
        self._mismatch: list[Parts] = []
        self._max_abs = self._max_abs_of_update = 0.0
        self._moved = False
        if decided.old_logp is not None and tools.rank == 0:
            self._mismatch.append(self._compare(range(len(rows)), decided, decided.old_logp))
            self._max_abs = self._max_abs_of_update

    def make(self, update: Update, lr: float) -> float:
        """One optimizer update, its denominator known before the first backward; the gradient's norm.

        Not finite: the step was not made.
        """
        rollouts = len({self._rollouts[row] for row in update.rows})
        denominator = self._tools.objective.denominator(self._decided.select(update.rows), rollouts)
        self._max_abs_of_update = 0.0
        norm = self._updates.make(update, lr, lambda rows, counted: self._loss(rows, counted, denominator))
        if math.isfinite(norm):
            self._moved = True
            self._max_abs = max(self._max_abs, self._max_abs_of_update)
        return norm

    def suspects(self) -> list[int]:
        """See Updates.suspects."""
        return self._updates.suspects()

    def metrics(self) -> dict[str, float]:
        """See Updates.averages. Every rank must ask."""
        report = {_NAMES[name]: value for name, value in self._updates.averages(self._mismatch).items()}
        largest = max(gather(self._max_abs))
        if "mismatch/kl" in report:
            report["mismatch/max_abs"] = largest
        zeroed = report.get("correction/zeroed", 0.0)
        if zeroed > 0.5 and self._tools.rank == 0:
            logger.warning("the off-policy correction gives %.0f %% of the trained tokens weight 0", 100 * zeroed)
        return report

    def _loss(self, rows: MicroBatch, counted: bool, denominator: float) -> LossShare:
        """The share of the update's loss that some rows have; its output is their log-probs."""
        tools = self._tools
        decided = self._decided.share(rows, counted, tools.device)
        logp, entropy = map(aligned, tools.reader(tools.backend, [self._rows[row] for row in rows]))
        old = self._old(logp, decided)
        loss, metrics = tools.objective.loss(logp, old, entropy, decided, denominator, self._kl_coef)
        metrics = metrics | measure({"entropy": entropy}, decided.mask)
        if not self._moved and decided.old_logp is None:
            metrics |= self._compare(rows, decided, logp.detach())
        return LossShare(loss, logp, metrics, decided.bad(logp))

    def _old(self, logp: Tensor, decided: Decided) -> Tensor:
        """Log-probs of the proximal policy."""
        if self._tools.objective.old_logp == "rollout":
            return decided.rollout_logp
        return logp.detach() if decided.old_logp is None else decided.old_logp

    def _compare(self, rows: Sequence[int], decided: Decided, logp: Tensor) -> Parts:
        """The trainer's log-probs [B, L] against those the engine gave, where both are of the same weights."""
        current = self._current[torch.as_tensor(rows), : logp.shape[1]].to(logp.device)
        same = decided.mask & current
        engine, ours = torch.where(same, decided.rollout_logp, 0.0), torch.where(same, logp, 0.0)
        if bool(same.any()):
            self._max_abs_of_update = max(self._max_abs_of_update, float((engine - ours).abs().max()))
        return measure({"mismatch_kl": kl_estimate(engine, ours, "k3")}, same)
