"""The models that look at a batch before its updates: the policy itself, reference, teacher, critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..trajectory import Row
from .batch import MicroBatch, plan_updates
from .batch_pass import Tools
from .critic import Critic
from .reference import Reference
from .scoring import Scores, Share
from .slots import at_slots, rollout_ids, trained_mask


@dataclass(frozen=True)
class Judges:
    """None = the run has no such model."""

    tools: Tools
    reference: Reference | None
    teacher: Reference | None
    critic: Critic | None

    def score(self, rows: Sequence[Row], *, ranks: int, budget: int) -> Scores:
        """What each of them says of the rows that have a verdict. Every rank must call it; all get the same."""
        steps = _steps(rows, ranks, budget)
        if not steps:
            return self._nothing(torch.zeros(trained_mask(rows).shape))
        share = Share(rows, steps, self.tools.rank)
        values, after = (None, None) if self.critic is None else share.evaluate(self.critic.values, 2)
        return Scores(
            logp=self._proximal(rows, share),
            ref_logp=_frozen(self.reference, share),
            teacher_logp=_frozen(self.teacher, share),
            values=values,
            bootstrap=None if after is None else self._bootstrap(rows, after),
        )

    def _nothing(self, table: Tensor) -> Scores:
        """The scores of a batch in which nobody is asked."""
        objective = self.tools.objective
        return Scores(
            logp=table if objective.needs_logp or objective.judged else None,
            ref_logp=None if self.reference is None else table,
            teacher_logp=None if self.teacher is None else table,
            values=None if self.critic is None else table,
        )

    def _proximal(self, rows: Sequence[Row], share: Share) -> Tensor | None:
        if self.tools.objective.needs_logp:
            return share.evaluate(self._policy)[0]
        return at_slots([row.logprobs for row in rows], rows) if self.tools.objective.judged else None

    def _policy(self, rows: Sequence[Row]) -> tuple[list[Tensor], ...]:
        return self.tools.reader(self.tools.backend, rows)

    def _bootstrap(self, rows: Sequence[Row], after: Tensor) -> Tensor:
        """V(state after the row's last trained token) of truncated rollouts, where asked; else 0: float32[B]."""
        if not self.tools.objective.bootstrap_truncated:
            return torch.zeros(len(rows))
        last = (trained_mask(rows).sum(1) - 1).clamp(min=0)
        truncated = torch.tensor([row.truncated for row in rows], dtype=torch.bool)
        return torch.where(truncated, after.gather(1, last[:, None])[:, 0], 0.0)


def _steps(rows: Sequence[Row], ranks: int, budget: int) -> Sequence[Sequence[MicroBatch]]:
    """Micro-batches of all rows with a verdict and a trained token. Raises ConfigError as `plan_updates` does."""
    used = [row.total_reward is not None and bool(row.loss_mask.any()) for row in rows]
    (everything,) = plan_updates(rollout_ids(rows), [len(row) for row in rows], used, ranks=ranks, budget=budget)
    return everything.steps


def _frozen(judge: Reference | None, share: Share) -> Tensor | None:
    if judge is None:
        return None
    (logp,) = share.evaluate(lambda rows: (judge.log_probs(rows),))
    judge.rest()
    return logp
