"""Log-probabilities and entropy of the tokens that were taken, at the rollout temperature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from .distribution import entropy, token_logprobs
from .models import Policy, trunk_states
from .packing import Pack

CHUNK_LOGITS = 2**25
"""Logits in float32 at once: 128 MiB."""


class TokenScorer(nn.Module):
    """The policy as the trainer uses it: packs in, one log-probability (float32) for each trained token out.

    Logits exist only at positions that predict a trained token, a chunk of them at a time, and are computed again in
    the backward pass when the packs together have more than one chunk. Of a model whose head is not known, the logits of a
    pack come whole, and stay for the backward pass in the model's type.
    """

    def __init__(self, policy: Policy, temperature: float, *, entropy_grad: bool = False) -> None:
        super().__init__()
        self.policy_model = policy.model
        self._policy = policy
        self._temperature = temperature
        self._entropy_grad = entropy_grad

    def forward(self, packs: Sequence[Pack]) -> tuple[Tensor, Tensor]:
        """(logp float32[N], entropy float32[N]) over the trained tokens of the packs, in their order."""
        self._policy.drop_inputs(torch.is_grad_enabled())
        size = max(1, CHUNK_LOGITS // self.policy_model.config.get_text_config().vocab_size)
        again = torch.is_grad_enabled() and sum(max(pack.most, len(pack.labels)) for pack in packs) > size
        scored = [part for pack in packs for part in self._score(pack, size, again)]
        return torch.cat([logp for logp, _ in scored]), torch.cat([entropy for _, entropy in scored])

    def _score(self, pack: Pack, size: int, again: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of at most `size` tokens, as many as of the other ranks' packs where these keep in step; `again` = the
        backward pass computes their logits once more.
        """
        model, head = self.policy_model, self._policy.head
        measure = self._measure if head is None else self._head
        if head is None:
            parts = self._whole_logits(pack)
        else:
            parts = trunk_states(model, pack.ids, pack.positions, pack.segments, **pack.pixels)[pack.predict]
        count = max(1, -(-max(pack.most, len(pack.labels)) // size))
        for chunk, labels in zip(parts.tensor_split(count), pack.labels.tensor_split(count), strict=True):
            yield checkpoint(measure, chunk, labels, use_reentrant=False) if again else measure(chunk, labels)

    def _head(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        assert self._policy.head is not None
        return self._measure(self._policy.head(self.policy_model.get_output_embeddings()(states)), labels)

    def _measure(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self._entropy_grad and torch.is_grad_enabled()):
            spread = entropy(logits, self._temperature)
        return token_logprobs(logits, labels, self._temperature), spread

    def _whole_logits(self, pack: Pack) -> Tensor:
        """Logits [N, V], in the model's type, where the head is not known."""
        output = self.policy_model(
            input_ids=pack.ids[None],
            position_ids=pack.positions,
            attention_mask=None,
            use_cache=False,
            segments=pack.segments,
            logits_to_keep=pack.predict,
            **pack.pixels,
        )
        logits: Tensor = output.logits[0]
        return logits


class AnswerScorer(TokenScorer):
    """At temperature 1, as SFT and DPO are; beside the log-probability stands 1 where the token is the likeliest one, else 0."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, 1.0)

    def _measure(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        likeliest = logits.detach().argmax(-1) == labels
        return -cross_entropy(logits.float(), labels, reduction="none"), likeliest.float()
