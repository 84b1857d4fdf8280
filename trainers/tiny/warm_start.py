"""Supervised warm start: imitate a demonstrator that knows, then one that slips.

The first stage trains everything until held-out tasks are solved; the second only the output head, until the policy
slips as often as wanted. So the success rate that reinforcement learning starts from is set by the demonstrator, not by
the moment training is stopped, and what the layers below have learned stays as it is.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.torchvision_ops import ensure_torchvision_imports

from .collate import IGNORED, Collator
from .demonstrations import CalculatorDemonstrator, Demonstration, Demonstrator, ScreenshotDemonstrator
from .models import build, mixes_patches

Progress = Callable[[str, float], None]
WARM_UP = 50
HEAD_LR = 1e-2
MUON_LR = 2e-2


@dataclass(frozen=True)
class Recipe:
    """How one kind is warm-started.

    Stage one ends when held-out replies are right with mean probability `known`, looked at every `check_every` steps,
    or after `max_steps`; stage two takes `careless_steps` with replies wrong with probability `slip`. A batch holds
    `batch` demonstrations of one turn, fewer of longer ones.
    """

    demonstrator: Callable[[Any], Demonstrator]
    known: float
    slip: float
    max_steps: int
    careless_steps: int
    batch: int = 32
    lr: float = 2e-3
    weight_decay: float = 1.0
    check_every: int = 25
    held_out: int = 48


RECIPES = {
    "tiny-vlm": Recipe(ScreenshotDemonstrator, known=0.95, slip=0.7, max_steps=380, careless_steps=60),
    "tiny-text": Recipe(
        CalculatorDemonstrator, known=0.9, slip=0.3, max_steps=800, careless_steps=60, weight_decay=0.1
    ),
}


def warm_started(
    kind: str, *, seed: int = 1, progress: Progress | None = None, max_steps: int | None = None
) -> tuple[Any, Any]:
    """(model, processor or tokenizer) of a kind, on one thread; torch's random state and thread count are restored."""
    ensure_torchvision_imports()
    with _one_thread_own_randomness():
        model, processor = build(kind, seed)
        if max_steps != 0:
            _WarmStart(model, processor, RECIPES[kind], seed, progress or (lambda stage, share: None)).run(max_steps)
    return model.eval(), processor


@contextlib.contextmanager
def _one_thread_own_randomness() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


class _WarmStart:
    def __init__(self, model: Any, processor: Any, recipe: Recipe, seed: int, progress: Progress) -> None:
        import torch

        self.model = model.train()
        self.recipe = recipe
        self.rng = random.Random(seed)
        self.progress = progress
        self.collate = Collator(processor)
        self.demonstrator = recipe.demonstrator(processor)
        head = list(model.get_output_embeddings().parameters())
        self.learn = _learning_optimizer(model, recipe)
        self.slip = [torch.optim.AdamW(head, lr=HEAD_LR, weight_decay=0.0)]

    def run(self, max_steps: int | None) -> None:
        recipe = self.recipe
        limit = recipe.max_steps if max_steps is None else min(max_steps, recipe.max_steps)
        held_out = self.demonstrator.held_out(recipe.held_out)
        for step in range(limit):
            decay = 1 - 0.9 * step / recipe.max_steps
            self._step(self.learn, decay * min(1.0, (step + 1) / WARM_UP), slip=0.0)
            self.progress("learn", (step + 1) / limit)
            if (step + 1) % recipe.check_every == 0 and self._knows(held_out):
                break
        careless = recipe.careless_steps if max_steps is None else min(max_steps, recipe.careless_steps)
        for step in range(careless):
            self._step(self.slip, 1 - step / careless, slip=recipe.slip)
            self.progress("slip", (step + 1) / careless)

    def _knows(self, held_out: list[Demonstration]) -> bool:
        return exact_reply_probability(self.model, self.collate, held_out) >= self.recipe.known

    def _step(self, optimizers: list[Any], share: float, slip: float) -> None:
        """One step at a share of each group's own learning rate."""
        import torch

        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = share * group.setdefault("full_lr", group["lr"])
        weights = self.demonstrator.turn_weights
        turns = self.rng.choices(range(1, len(weights) + 1), weights)[0]
        batch = [self.demonstrator.draw(self.rng, turns, slip) for _ in range(self.recipe.batch // turns)]
        losses = _token_losses(self.model, self.collate, batch)
        (losses.sum() / (losses > 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group["params"]], 1.0)
        for optimizer in optimizers:
            optimizer.step()
        self.model.zero_grad()


def _learning_optimizer(model: Any, recipe: Recipe) -> list[Any]:
    """Muon for the matrices inside the layers (half the steps of AdamW on these tasks), AdamW for the rest."""
    import torch

    trained = [(name, parameter) for name, parameter in model.named_parameters() if not mixes_patches(name)]
    inside = [
        parameter for name, parameter in trained if parameter.ndim == 2 and "embed" not in name and "head" not in name
    ]
    taken = {id(parameter) for parameter in inside}
    rest = [parameter for _, parameter in trained if id(parameter) not in taken]
    decay = recipe.weight_decay
    return [
        torch.optim.Muon(inside, lr=MUON_LR, weight_decay=decay / 2),
        torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=decay),
    ]


def exact_reply_probability(model: Any, collate: Collator, demonstrations: list[Demonstration]) -> float:
    """The mean probability, at temperature 1, with which the model gives exactly the replies shown."""
    import torch

    with torch.no_grad():
        losses = _token_losses(model, collate, demonstrations)
    return float(torch.exp(-losses.sum(dim=1)).mean())


def _token_losses(model: Any, collate: Collator, batch: list[Demonstration]) -> Any:
    """[B, T - 1]: the negative log-probability of each target token, 0 elsewhere."""
    from torch.nn.functional import cross_entropy

    inputs, labels = collate(batch)
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
