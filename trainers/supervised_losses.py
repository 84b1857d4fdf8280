"""What sft, rm and dpo ask of the module, and their share of an update's loss that some examples have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config import DpoConfig, SupervisedConfig
from ..errors import ConfigError
from ..supervised.examples import Item, Pair
from .metrics import Mean, measure
from .models import SCORE, TEXT, Policy
from .preference import dpo_loss, reward_model_loss
from .reward_scorer import SequenceScorer
from .scorer import AnswerScorer
from .updating import LossShare

Outputs = Sequence[Sequence[Tensor]]
"""What the module says of `rows_of(items)`: each output one tensor a row."""


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer update, known before its first backward: items, and trained tokens of the rows that a
    likelihood is taken of (the chosen ones of pairs).
    """

    items: int
    tokens: int

    @classmethod
    def of(cls, items: Sequence[Item]) -> Totals:
        rows = [item.chosen if isinstance(item, Pair) else item for item in items]
        return cls(len(items), sum(int(row.loss_mask.sum()) for row in rows))


class SupervisedLoss(Protocol):
    """`head` = what the model has on top. Metrics of a share are means over its tokens or pairs."""

    head: str

    def module(self, policy: Policy) -> nn.Module: ...

    def share(self, outputs: Outputs, items: Sequence[Item], totals: Totals) -> LossShare: ...


class Imitation:
    """SFT: -log p, a mean over the trained tokens of the update. Metrics over these: accuracy (the token is the likeliest)."""

    head = TEXT

    def module(self, policy: Policy) -> nn.Module:
        return AnswerScorer(policy)

    def share(self, outputs: Outputs, items: Sequence[Item], totals: Totals) -> LossShare:
        logp, hits = (torch.cat(list(output)) for output in outputs)
        seen = measure({"accuracy": hits}, torch.ones_like(hits, dtype=torch.bool))
        return LossShare(-logp.sum() / totals.tokens, logp, seen, _bad(outputs[0]))


class RewardModelling:
    """-logsigmoid(r_chosen - r_rejected - margin), a mean over the pairs of the update. Metrics: see `reward_model_loss`;
    score_mean and score_square over all scores.
    """

    head = SCORE

    def module(self, policy: Policy) -> nn.Module:
        return SequenceScorer(policy)

    def share(self, outputs: Outputs, items: Sequence[Item], totals: Totals) -> LossShare:
        scores = torch.cat(list(outputs[0]))
        pairs = _pairs(items)
        margin = torch.tensor([pair.margin for pair in pairs], device=scores.device)
        loss, seen = reward_model_loss(scores[::2], scores[1::2], margin=margin)
        every = torch.ones_like(scores, dtype=torch.bool)
        seen |= measure({"score_mean": scores, "score_square": scores.square()}, every)
        return LossShare(loss * (len(pairs) / totals.items), scores, seen, _bad(outputs[0], pairs=True))


@dataclass(frozen=True)
class Preference:
    """DPO and its kin on log-probabilities summed over the answer tokens, a mean over the pairs of the update, plus nll_coef
    times the chosen answers' -log p, a mean over their tokens. Metrics: see `dpo_loss`; nll.
    """

    beta: float
    kind: str
    label_smoothing: float
    nll_coef: float

    head = TEXT

    def module(self, policy: Policy) -> nn.Module:
        return AnswerScorer(policy)

    def share(self, outputs: Outputs, items: Sequence[Item], totals: Totals) -> LossShare:
        logp = list(outputs[0])
        sums = torch.stack([row.sum() for row in logp])
        pairs = _pairs(items)
        references = [_reference(pair) for pair in pairs]
        reference = torch.tensor(references, device=sums.device)
        loss, seen = dpo_loss(
            sums[::2],
            sums[1::2],
            reference[:, 0],
            reference[:, 1],
            beta=self.beta,
            kind=self.kind,
            label_smoothing=self.label_smoothing,
        )
        chosen = torch.cat(logp[::2])
        seen |= {"nll": Mean(-float(chosen.detach().sum()), float(len(chosen)))}
        share = loss * (len(pairs) / totals.items) - self.nll_coef * chosen.sum() / totals.tokens
        return LossShare(share, torch.cat(logp), seen, _bad(logp, pairs=True))


def _reference(pair: Pair) -> tuple[float, float]:
    if pair.reference is None:
        raise ValueError("the reference's log-probabilities come first")
    return pair.reference


def _pairs(items: Sequence[Item]) -> list[Pair]:
    return [item for item in items if isinstance(item, Pair)]


def _bad(rows: Sequence[Tensor], *, pairs: bool = False) -> Tensor:
    """bool[items]: those with an output that is not finite."""
    bad = torch.tensor([not bool(row.detach().isfinite().all()) for row in rows])
    return bad.view(-1, 2).any(1) if pairs else bad


def find_loss(config: SupervisedConfig) -> SupervisedLoss:
    """The loss of a run."""
    if isinstance(config, DpoConfig):
        options: dict[str, Any] = config.dpo.model_dump()
        return Preference(**options)
    losses: dict[str, SupervisedLoss] = {"sft": Imitation(), "rm": RewardModelling()}
    if config.kind not in losses:
        raise ConfigError(f"there is no supervised training of kind {config.kind}")
    return losses[config.kind]
