"""One rank of the policy's trainer: advantages, planned updates, versions, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from ..config import Config
from ..engines.weights import WeightPublisher, WeightSource
from ..errors import AgentRLError
from ..image_store import ImageStore
from ..training import TrainReport
from ..trajectory import Row
from .advantages import Advantages
from .backend import Backend, Offload, Place, join
from .batch import Update, plan_updates
from .batch_pass import BatchPass, Tools
from .checkpoint import TAG, About, Counters, load_state, save_state
from .ema import WeightAverage
from .estimators import find_estimator
from .export import adapter_weights, export_adapter, export_policy, hub_weights, whole_weights
from .metrics import averages, measure
from .models import Policy, load_policy
from .objective import Decided, Objective, rollout_ids, spread, trained_mask
from .optimizers import learning_rate, make_optimizer
from .picture_check import check_pictures
from .pixels import PixelCache, load_pictures
from .scorer import TokenScorer

logger = logging.getLogger(__name__)


class DivergenceError(AgentRLError):
    """More updates with non-finite gradients than `train.max_bad_steps` allows."""


class PolicyTrainer:
    """Trains one policy. With several ranks each has one of these, and every method is called on all of them alike.

    Every rank gets the whole batch and computes the same advantages, plan and denominators from it, so nothing but
    gradients and metrics is reduced. `version` = the weights last published.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        image_dir: str,
        planned_updates: int,
        default_lr: float,
        place: Place | None = None,
    ) -> None:
        place = place or Place()
        torch.set_num_threads(config.parallel.threads)
        torch.manual_seed(config.run.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        join(place, device)
        self._config = config
        self._model_path = model_path
        self._planned = planned_updates
        self._lr = config.optim.lr or default_lr
        self._ranks = place.ranks
        self._counters = Counters()
        self._publisher = WeightPublisher()
        dtype = _dtype(config, device)
        policy = load_policy(
            model_path,
            dtype=dtype,
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            gradient_checkpointing=config.train.gradient_checkpointing,
            lora=config.lora,
            freeze_vision=config.model.freeze_vision,
        )
        pictures = _pictures(policy, config, model_path, image_dir)
        policy = check_pictures(policy, pictures)
        objective = Objective.of(config)
        self._tools = Tools(
            policy=policy,
            pictures=pictures,
            backend=_backend(policy, config, objective, self._lr, dtype),
            objective=objective,
            rank=place.rank,
            device=device,
            always_look=policy.vision and place.ranks > 1,
        )
        self._about = _about(config, model_path, dtype, self._tools.backend.stage)
        self._average = _average(config, self._tools.backend)

    @property
    def version(self) -> int:
        return self._counters.version

    @property
    def policy(self) -> Policy:
        return self._tools.policy

    # ------------------------------------------------------------------ one batch

    def train(self, rows: Sequence[Row], step: int) -> TrainReport:
        """One batch: advantages over all of it, then its planned updates.

        Rows of one rollout stand together, in order. Raises ConfigError when a row is longer than a micro-batch, and
        DivergenceError after too many updates with non-finite gradients.
        """
        objective, first = self._tools.objective, self._counters.updates
        found = objective.advantages(rows)
        decided = objective.decide(rows, found)
        plan = self._plan(rows, decided)
        report = TrainReport(False, self._batch_metrics(rows, found), spread(found.advantages, rows))
        if objective.has_signal(decided):
            batch = BatchPass(self._tools, rows, decided, self.version)
            if objective.old_logp == "recompute":
                batch.recompute(plan[: self._config.train.updates_per_batch])
            for update in plan:
                report.updated |= self._make(batch, update, step)
            report.metrics |= batch.metrics()
        self._counters.updates = first + len(plan)
        report.metrics["policy/lr"] = self._rate(self._counters.updates - 1)
        report.metrics["policy/bad_steps"] = float(self._counters.bad_steps)
        if self._tools.device.type == "cuda":
            report.metrics["memory/gpu"] = float(torch.cuda.max_memory_allocated())
        return report

    def _plan(self, rows: Sequence[Row], decided: Decided) -> list[Update]:
        return plan_updates(
            rollout_ids(rows),
            [len(row) for row in rows],
            decided.mask.any(1).tolist(),
            updates=self._config.train.updates_per_batch,
            epochs=self._config.train.epochs,
            ranks=self._ranks,
            budget=self._config.train.micro_batch_tokens,
            half_cost=self.policy.half_cost,
        )

    def _make(self, batch: BatchPass, update: Update, step: int) -> bool:
        """One planned update; True when the weights moved."""
        index = self._counters.updates
        self._counters.updates += 1
        if not update.rows:
            return False
        norm = batch.make(update, self._rate(index))
        if math.isfinite(norm):
            if self._average is not None:
                self._average.update()
            return True
        self._counters.bad_steps += 1
        bad, allowed = self._counters.bad_steps, self._config.train.max_bad_steps
        message = (
            f"step {step}, update {index}: the gradient is not finite ({norm}); the update was skipped ({bad} so far)"
        )
        logger.warning("%s", message)
        if bad > allowed:
            raise DivergenceError(f"{message}; --train.max-bad-steps allows {allowed}")
        return False

    def _rate(self, update: int) -> float:
        return learning_rate(self._config.optim, self._lr, update, self._planned)

    def _batch_metrics(self, rows: Sequence[Row], found: Advantages) -> dict[str, float]:
        """advantage/* over trained tokens of valid rollouts; counts of rollouts and groups that gave nothing."""
        mask = trained_mask(rows) & found.valid[:, None]
        means = averages(measure({"mean": found.advantages, "square": found.advantages.square()}, mask))
        ids = rollout_ids(rows)
        usable = {ids[i]: i for i, row in enumerate(rows) if row.total_reward is not None and row.loss_mask.any()}
        shrunk = {rows[i].group_id for i in usable.values() if not found.valid[i]}
        metrics = {"rollouts/unused": float(len(set(ids)) - len({ids[i] for i in range(len(rows)) if found.valid[i]}))}
        if find_estimator(self._tools.objective.advantage).grouped:
            metrics["groups/shrunk"] = float(len(shrunk))
        if means:
            metrics["advantage/mean"] = means["mean"]
            metrics["advantage/std"] = max(0.0, means["square"] - means["mean"] ** 2) ** 0.5
        return metrics

    # ------------------------------------------------------------------ weights and state

    def publish(self, version: int) -> WeightSource | None:
        """The current weights, under the names of a Hugging Face checkpoint, in shared memory of rank 0's host.

        None on other ranks, which take part in the gathering.
        """
        self._counters.version = version
        weights = self._weights()
        return self._publisher.publish(hub_weights(self.policy.model, weights).items(), version) if weights else None

    def release(self) -> None:
        """Free what `publish` gave."""
        self._publisher.release()

    def save(self, folder: Path) -> None:
        """Weights, their average, optimizer, random state and counters into an existing folder."""
        save_state(self._tools.backend, self._counters, self._about, folder)
        if self._average is not None:
            self._average.save(folder / TAG)

    def load(self, folder: Path) -> None:
        """The state that `save` wrote with as many ranks. Raises DataError when the folder holds another."""
        self._counters = load_state(self._tools.backend, self._about, folder)
        if self._average is not None:
            self._average.load(folder / TAG)

    def export(self, folder: Path) -> None:
        """A Hugging Face folder of the weights, averaged ones where an average is kept: weights, configuration, tokenizer,
        processor, chat template; a LoRA adapter once more by itself in `adapter/`.
        """
        backend, first = self._tools.backend, self._tools.rank == 0
        with nullcontext() if self._average is None else self._average.in_place():
            weights = self._weights()
            adapter = adapter_weights(self.policy.model, backend, keep=first)
            if first:
                export_policy(self.policy.model, weights, self._model_path, folder)
            if adapter:
                export_adapter(self.policy.model, adapter, self._model_path, folder)

    def _weights(self) -> dict[str, Tensor]:
        """All of them on rank 0, none on the others, which take part in the gathering."""
        return whole_weights(self.policy.model, self._tools.backend, keep=self._tools.rank == 0)

    def close(self) -> None:
        """Free shared memory and leave the process group."""
        self._publisher.release()
        self._tools.backend.close()


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32


def _about(config: Config, model_path: str, dtype: torch.dtype, stage: int) -> About:
    return About(
        model=model_path,
        trust_remote_code=config.model.trust_remote_code,
        dtype=str(dtype).removeprefix("torch."),
        stage=stage,
        lora=config.lora.model_dump(),
    )


def _average(config: Config, backend: Backend) -> WeightAverage | None:
    module = backend.engine.module
    return WeightAverage(module, config.optim.ema, sharded=backend.stage == 3) if config.optim.ema else None


def _pictures(policy: Policy, config: Config, model_path: str, image_dir: str) -> PixelCache | None:
    if not policy.vision:
        return None
    return load_pictures(model_path, ImageStore(image_dir), trust_remote_code=config.model.trust_remote_code)


def _backend(policy: Policy, config: Config, objective: Objective, lr: float, dtype: torch.dtype) -> Backend:
    scorer = TokenScorer(policy, config.rollout.temperature, entropy_grad=objective.entropy_coef != 0)
    return Backend(
        scorer,
        make_optimizer(scorer, config.optim, lr),
        stage=config.parallel.zero_stage,
        max_norm=config.optim.max_norm,
        dtype=dtype,
        offload=Offload(config.parallel.offload_optimizer, config.parallel.offload_params),
    )
