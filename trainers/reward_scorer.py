"""A reward model: one number for a sequence, read at its last token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .models import Policy, trunk_states
from .packing import Pack


class SequenceScorer(nn.Module):
    """The reward model as the trainer uses it: packs in, one score (float32) for each sequence out.

    A row's last token alone is marked as trained, so it is where the score is read: packed rows have no padding, so that is
    the last attended token, whichever side others would pad. No temperature.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy_model = policy.model
        self._policy = policy

    def forward(self, packs: Sequence[Pack]) -> tuple[Tensor]:
        """Scores float32[N] of the sequences of the packs, in their order."""
        self._policy.drop_inputs(torch.is_grad_enabled())
        return (torch.cat([self._scores(pack) for pack in packs]),)

    def _scores(self, pack: Pack) -> Tensor:
        states = trunk_states(self.policy_model, pack.ids, pack.positions, pack.segments, **pack.pixels)
        scores: Tensor = self.policy_model.score(states[pack.predict + 1])[:, 0].float()
        return scores
