"""The critic: a value function with the trunk of a language model, and its half of an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config, OptimSection
from ..errors import DataError
from ..trajectory import Row
from .backend import Backend, Offload
from .checkpoint import TAG as CHECKPOINT
from .checkpoint import UNIVERSAL, whole
from .models import TRUNK, trunk_states
from .optimizers import learning_rate, make_optimizer
from .packing import Pack
from .reading import Reader, check_vocabulary, compute_dtype, open_model

LR_RATIO = 5.0
"""Times the policy's learning rate, where none is given: the head starts from nothing and has no ratio to hold it back."""
TAG = "critic"


class ValueModel(nn.Module):
    """A trunk and one linear output, which starts at 0. No temperature: values are no log-probabilities."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        embedding = trunk.get_input_embeddings().weight
        width = trunk.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, dtype=embedding.dtype, device=embedding.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, packs: Sequence[Pack]) -> tuple[Tensor, Tensor]:
        """(V(state before), V(state after)) each trained token of the packs, in their order: float32[N] each."""
        both = [self._values(pack) for pack in packs]
        return torch.cat([before for before, _ in both]), torch.cat([after for _, after in both])

    def _values(self, pack: Pack) -> tuple[Tensor, Tensor]:
        states = trunk_states(self.trunk, pack.ids, pack.positions, pack.segments, **pack.pixels)
        values = self.head(states)[:, 0].float()
        return values[pack.predict], values[pack.predict + 1]


class Critic:
    """A value model under DeepSpeed with an optimizer and a schedule of its own, on the ranks of the policy."""

    def __init__(self, config: Config, reader: Reader, policy_lr: float, planned_updates: int) -> None:
        trunk = reader.policy.trunk
        self._reader = reader.with_model(trunk)
        self._optim = critic_optim(config)
        self._lr = config.critic.lr or LR_RATIO * policy_lr
        self._planned = planned_updates
        self.device = reader.device
        self.value_clip = config.critic.value_clip or None
        self.model = ValueModel(trunk)
        self.backend = Backend(
            self.model,
            make_optimizer(self.model, self._optim, self._lr),
            stage=config.parallel.zero_stage,
            max_norm=self._optim.max_norm,
            dtype=compute_dtype(config, reader.device),
            offload=Offload.of(config.parallel),
        )

    def values(self, rows: Sequence[Row]) -> tuple[list[Tensor], ...]:
        """V before and after each trained token of the rows."""
        return self._reader(self.backend, rows)

    def rate(self, update: int) -> float:
        """The learning rate of a planned update, made or skipped."""
        return learning_rate(self._optim, self._lr, update, self._planned)

    def save(self, folder: Path) -> None:
        """Weights and optimizer into `folder/critic`. All ranks together."""
        self.backend.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """What `save` wrote. Raises DataError when there is none."""
        universal = (folder / CHECKPOINT / UNIVERSAL).is_file() and self.backend.stage > 0
        with whole(folder), self.backend.loading(universal):
            found = (folder / TAG).is_dir() and self.backend.engine.load_checkpoint(str(folder), tag=TAG)[0] is not None
        if not found:
            raise DataError(f"{folder} holds no critic: the checkpoint is of a run without one.")

    def close(self) -> None:
        """The policy's backend leaves the process group."""
        self.backend.engine.destroy()


def open_critic(
    config: Config, model_path: str, image_dir: str, device: torch.device, ranks: int, lr: float, planned: int
) -> Critic:
    """The critic on the trunk of `critic.path`, or of the policy's model."""
    path = config.critic.path or model_path
    check_vocabulary(config, path, model_path, "--critic.path")
    reader = open_model(config, path, image_dir, trained=True, device=device, ranks=ranks, head=TRUNK)
    return Critic(config, reader, lr, planned)


def critic_optim(config: Config) -> OptimSection:
    """The policy's kind of optimizer with the critic's own settings."""
    critic = config.critic
    return config.optim.model_copy(
        update={
            "schedule": critic.schedule or config.optim.schedule,
            "warmup": critic.lr_warmup,
            "warmup_ratio": critic.lr_warmup_ratio,
            "min_lr_ratio": critic.min_lr_ratio,
            "weight_decay": critic.weight_decay,
            "max_norm": critic.max_norm,
        }
    )
