"""One optimizer update as others make it, on the rows that agentrl's trainer is given: a bare loop, a padded one, TRL's GRPO.

All of them: float32, AdamW, the gradient clipped to norm 1, log-probs divided by no temperature, a clipped ratio.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl import Row

Update = Callable[[], None]


class BareLoop:
    """Hugging Face's model, torch's AdamW, and nothing else. `size` = rows that are padded together."""

    def __init__(self, path: str, lr: float, size: int) -> None:
        from transformers import AutoModelForCausalLM

        self._size = size
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def unpadded(self, rows: Sequence[Row], advantages: Sequence[float]) -> None:
        """One forward and backward pass for each row."""
        count = sum(int(row.loss_mask.sum()) for row in rows)
        for row, advantage in zip(rows, advantages, strict=True):
            ids = torch.from_numpy(row.token_ids).long()[None]
            mask = torch.from_numpy(row.loss_mask)[None]
            self._accumulate(self.model(input_ids=ids, use_cache=False).logits, ids, mask, Tensor([advantage]), count)
        self._step()

    def padded(self, rows: Sequence[Row], advantages: Sequence[float]) -> None:
        """Rows in the order they came, `size` at a time, padded to the longest of them."""
        count = sum(int(row.loss_mask.sum()) for row in rows)
        for start in range(0, len(rows), self._size):
            part = rows[start : start + self._size]
            ids = side_by_side([row.token_ids for row in part])
            mask = side_by_side([row.loss_mask for row in part]).bool()
            real = side_by_side([np.ones(len(row)) for row in part])
            logits = self.model(input_ids=ids, attention_mask=real, use_cache=False).logits
            self._accumulate(logits, ids, mask, Tensor(advantages[start : start + self._size]), count)
        self._step()

    def _accumulate(self, logits: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, count: int) -> None:
        logp = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logp - logp.detach()).exp()
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        (-(gain * mask[:, 1:]).sum() / count).backward()

    def _step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def side_by_side(parts: Sequence[np.ndarray], *, left: bool = False) -> Tensor:
    """int64[B, T], padded with 0 on the right, or on the left."""
    width = max(len(part) for part in parts)
    rows = [np.pad(part, (width - len(part), 0) if left else (0, width - len(part))) for part in parts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


class TrlLoop:
    """TRL's GRPOTrainer from the point where the completions are there: its loss, backward, clip and step.

    Raises ImportError when TRL is not installed.
    """

    def __init__(self, path: str, lr: float, size: int) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        options = GRPOConfig(
            output_dir=self._folder.name,
            use_cpu=True,
            report_to=[],
            per_device_train_batch_size=size,
            learning_rate=lr,
            num_generations=2,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        )
        self.trainer = GRPOTrainer(
            model=path,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=options,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * size),
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1

    def update(self, rows: Sequence[Row], advantages: Sequence[float]) -> None:
        """Micro-batches as in `BareLoop.padded`; prompts padded on the left, completions on the right, as TRL has them."""
        trainer, model = self.trainer, self.trainer.model
        model.train()
        count = torch.tensor(sum(int(row.loss_mask.sum()) for row in rows))
        for start in range(0, len(rows), self._size):
            part = slice(start, start + self._size)
            inputs = _trl_inputs(rows[part]) | {
                "advantages": Tensor(advantages[part]),
                "num_items_in_batch": count,
            }
            trainer.compute_loss(model, inputs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def _trl_inputs(rows: Sequence[Row]) -> dict[str, Any]:
    cuts = [int(np.flatnonzero(row.loss_mask)[0]) for row in rows]
    prompts = [row.token_ids[:cut] for row, cut in zip(rows, cuts, strict=True)]
    completions = [row.token_ids[cut:] for row, cut in zip(rows, cuts, strict=True)]
    return {
        "prompt_ids": side_by_side(prompts, left=True),
        "prompt_mask": side_by_side([np.ones(len(part)) for part in prompts], left=True),
        "completion_ids": side_by_side(completions),
        "completion_mask": side_by_side([np.ones(len(part)) for part in completions]),
    }
