"""The algorithm of a run with every axis resolved, applied to rows: their advantages, and the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import Config
from ..trajectory import Row
from .advantages import Advantages, compute_advantages
from .aggregation import aggregate, token_weights
from .decided import Decided
from .estimators import Estimator, algorithm, find_estimator
from .kl import kl_estimate, kl_loss
from .losses import Loss, policy_loss
from .metrics import averages, measure
from .rewards import Shaping
from .scoring import Scores
from .slots import at_slots, rollout_ids, trained_mask


@dataclass(frozen=True)
class Objective:
    """The axes of `algo`, none left open. `old_logp` is current | recompute | rollout; `kl_where` is none | reward | loss.

    The coefficient of the KL is not here: it may be steered from batch to batch.
    """

    advantage: str
    level: str
    clip: tuple[float, float]
    dual_clip: float | None
    trust: str
    aggregation: str
    correction: str
    correction_level: str
    correction_range: tuple[float, float] | None
    old_logp: str
    gamma: float
    lam: float
    bootstrap_truncated: bool
    entropy_coef: float
    kl_where: str
    shaping: Shaping

    @classmethod
    def of(cls, config: Config) -> Objective:
        """Preset plus overrides. Raises ConfigError as `Shaping.of` does.

        Log-probs of an update that drops inputs of adapters are no measure of the policy, so it scores the batch before.
        """
        algo, train, preset = config.algo, config.train, algorithm(config.algo.name)
        before = train.updates_per_batch * train.epochs > 1 or config.lora.dropout > 0
        old_logp = ("recompute" if before else "current") if algo.old_logp == "auto" else algo.old_logp
        corrected = train.max_staleness > 0 and old_logp != "rollout"
        return cls(
            advantage=algo.advantage or preset.advantage,
            level=algo.level or preset.level,
            clip=algo.clip or preset.clip,
            dual_clip=algo.dual_clip,
            trust=algo.trust or preset.trust,
            aggregation=algo.aggregation or preset.aggregation,
            correction=("tis" if corrected else "none") if algo.correction == "auto" else algo.correction,
            correction_level=algo.correction_level,
            correction_range=algo.correction_range,
            old_logp=old_logp,
            gamma=algo.gamma,
            lam=algo.lam,
            bootstrap_truncated=algo.bootstrap_truncated,
            entropy_coef=algo.entropy_coef,
            kl_where=algo.kl.where if algo.kl.coef else "none",
            shaping=Shaping.of(config),
        )

    @property
    def estimator(self) -> Estimator:
        return find_estimator(self.advantage)

    @property
    def judged(self) -> bool:
        """Whether a KL is in the reward: the advantages need log-probs of the proximal policy."""
        return self.kl_where == "reward" or self.estimator.teacher

    @property
    def needs_logp(self) -> bool:
        """Whether the policy has to score a batch before its first update."""
        return self.old_logp == "recompute" or (self.judged and self.old_logp != "rollout")

    def advantages(self, rows: Sequence[Row], scores: Scores, kl_coef: float = 0.0) -> Advantages:
        """Of a whole batch, over its trained tokens: [B, L] as in `Decided`.

        A KL, from reference or teacher, is that of the proximal policy.
        """
        kl = self._divergence(scores, "k1")
        cost = 1.0 if self.estimator.teacher else kl_coef
        return compute_advantages(
            self.advantage,
            self.shaping.outcomes(rows),
            trained_mask(rows),
            group_ids=[row.group_id for row in rows],
            rollout_ids=rollout_ids(rows),
            values=scores.values,
            bootstrap=scores.bootstrap,
            token_rewards=self.shaping.token_rewards(rows),
            kl=kl,
            kl_coef=0.0 if kl is None else cost,
            gamma=self.gamma,
            lam=self.lam,
        )

    def divergences(self, scores: Scores, mask: Tensor) -> dict[str, float]:
        """kl/ref or kl/teacher of a KL in the reward: the mean of k3 over the mask. That of a KL in the loss is measured
        there.
        """
        kl = self._divergence(scores, "k3")
        name = "kl/teacher" if self.estimator.teacher else "kl/ref"
        return {} if kl is None else averages(measure({name: kl}, mask))

    def _divergence(self, scores: Scores, kind: str) -> Tensor | None:
        """The estimate of the KL that is in the reward, [B, L]; None without one."""
        judge = scores.teacher_logp if self.estimator.teacher else scores.ref_logp
        if not self.judged or judge is None or scores.logp is None:
            return None
        return kl_estimate(scores.logp, judge, kind)

    def decide(self, rows: Sequence[Row], found: Advantages, scores: Scores, version: int) -> Decided:
        """What the losses need of each trained token when weights of `version` are trained.

        Rows that are not valid, overlong rollouts and stale tokens leave the mask here, after the advantages.
        """
        slots = trained_mask(rows)
        mask = self.shaping.loss_mask(rows, slots & found.valid[:, None], version)
        if self.aggregation == "sequence_mean":
            weights = token_weights(mask, "sequence_mean", denominator=1.0, rollout_ids=rollout_ids(rows))
        else:
            weights = mask.float()
        return Decided(
            slots=slots,
            mask=mask,
            advantages=found.advantages,
            rollout_logp=at_slots([row.logprobs for row in rows], rows, slots),
            weights=weights,
            old_logp=scores.logp if self.old_logp == "recompute" else None,
            ref_logp=scores.ref_logp if self.kl_where == "loss" else None,
            returns=found.returns if scores.values is not None else None,
            old_values=scores.values,
        )

    def denominator(self, decided: Decided, rollouts: int) -> float:
        """The divisor of an update's loss: trained tokens, rollouts, or rollouts times the longest one possible."""
        if self.aggregation == "token_mean":
            return float(decided.mask.sum())
        return float(rollouts * (self.shaping.longest if self.aggregation == "constant" else 1))

    def has_signal(self, decided: Decided) -> bool:
        """False when no update of the policy can follow: nothing trained, or all advantages 0 and no other term."""
        if not bool(decided.mask.any()):
            return False
        other_terms = bool(self.entropy_coef) or decided.ref_logp is not None
        return other_terms or bool((decided.advantages[decided.mask] != 0).any())

    def loss(
        self,
        logp: Tensor,
        old_logp: Tensor,
        entropy: Tensor,
        decided: Decided,
        denominator: float,
        kl_coef: float = 0.0,
    ) -> Loss:
        """The part that some rows, all [B, L], add to their update's loss.

        The objective is linear in the size of the advantages (clips compare terms that scale alike), so the weights of
        rollouts that are spread over micro-batches go into them.
        """
        loss, metrics = policy_loss(
            logp,
            old_logp,
            decided.advantages * decided.weights,
            decided.mask,
            level=self.level,
            clip=self.clip,
            dual_clip=self.dual_clip,
            trust=self.trust,
            rollout_logp=decided.rollout_logp,
            correction=self.correction,
            correction_level=self.correction_level,
            correction_range=self.correction_range,
            aggregation="constant",
            denominator=denominator,
        )
        if self.entropy_coef:
            bonus = aggregate(entropy * decided.weights, decided.mask, "constant", denominator=denominator)
            loss = loss - self.entropy_coef * bonus
        if decided.ref_logp is not None:
            term = kl_loss(
                logp,
                decided.ref_logp,
                decided.mask,
                weights=decided.weights,
                aggregation="constant",
                denominator=denominator,
            )
            loss, metrics = loss + kl_coef * term.loss, metrics | term.metrics
        return Loss(loss, metrics)
