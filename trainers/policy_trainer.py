"""One rank of the trainer: advantages, planned updates of policy and critic, versions, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import Config
from ..engines.gpu_weights import make_publisher
from ..engines.weights import WeightSource
from ..training import TrainReport
from ..trajectory import Row
from .advantages import Advantages
from .backend import Place
from .bad_rows import DivergenceError as DivergenceError
from .batch import Update, plan_updates
from .batch_pass import BatchPass, Tools
from .core import Core, enter
from .critic import open_critic
from .critic_pass import CriticPass
from .decided import Decided
from .judges import Judges
from .kl_control import kl_controller
from .models import Policy
from .objective import Objective
from .reading import open_model
from .reference import open_reference, open_teacher
from .scorer import TokenScorer
from .scoring import Scores
from .slots import rollout_ids, spread, trained_mask
from .withheld import not_sampled, too_large, withhold


@dataclass(frozen=True)
class _Batch:
    """A batch whose advantages are made."""

    rows: Sequence[Row]
    step: int
    decided: Decided


class PolicyTrainer:
    """Trains one policy. With several ranks each has one of these, and every method is called on all of them alike.

    Every rank gets the whole batch and computes the same advantages, plan and denominators from it, so nothing but
    gradients, scores and metrics crosses between them. `version` = the weights last published. `image_dir` is in the
    run's folder.
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
        device = enter(config, place)
        self._config = config
        objective = Objective.of(config)
        reader = open_model(
            config, model_path, image_dir, trained=True, device=device, ranks=place.ranks, lora=config.lora
        )
        scorer = TokenScorer(reader.policy, config.rollout.temperature, entropy_grad=objective.entropy_coef != 0)
        self._core = Core(
            config,
            scorer,
            reader,
            place=place,
            model_path=model_path,
            image_dir=image_dir,
            planned_updates=planned_updates,
            default_lr=default_lr,
            publisher=make_publisher(config.engine.transport, config.engine.update_timeout_s),
        )
        self._tools = Tools(reader, self._core.backend, objective, place.rank)
        self._kl = kl_controller(config.algo.kl.coef, config.algo.kl.target, config.algo.kl.horizon)
        estimator, where = objective.estimator, (config, model_path, image_dir, device)
        self._critic = open_critic(*where, place.ranks, self._core.lr, planned_updates) if estimator.critic else None
        teacher = open_teacher(*where) if estimator.teacher else None
        reference = open_reference(*where, own=(reader, self._tools.backend))
        self._judges = Judges(self._tools, reference, teacher, self._critic)

    @property
    def version(self) -> int:
        return self._core.counters.version

    @property
    def policy(self) -> Policy:
        return self._tools.reader.policy

    # ------------------------------------------------------------------ one batch

    def train(self, rows: Sequence[Row], step: int) -> TrainReport:
        """One batch: scores of all models, advantages over all of it, then its planned updates.

        Rows of one rollout stand together, in order. A rollout whose reward float32 cannot hold has no verdict. With a
        log-prob or a value that is not finite at a trained token the step makes no update. Raises ConfigError when a row is
        longer than a micro-batch, and DivergenceError after too many steps that lost an update to such numbers.
        """
        objective, ids = self._tools.objective, rollout_ids(rows)
        large, sick = too_large(rows), not_sampled(rows)
        rows = self._skipped(self._without_verdict(rows, large, step), sick, step)
        scores = self._judges.score(rows, ranks=self._core.ranks, budget=self._config.train.micro_batch_tokens)
        suspects = scores.suspects()
        rows = self._skipped(rows, suspects, step)
        found = objective.advantages(rows, scores, self._kl.coef)
        decided = objective.decide(rows, found, scores, self.version)
        report = TrainReport(False, self._batch_metrics(rows, found, scores), spread(found.advantages, rows))
        report.metrics["rollouts/not_finite"] = float(len({ids[i] for i in (*large, *sick, *suspects)}))
        self._update(_Batch(rows, step, decided), report)
        report.metrics |= self._state_metrics()
        self._steer_kl(rows, report.metrics)
        return report

    def _without_verdict(self, rows: Sequence[Row], unfit: Sequence[int], step: int) -> Sequence[Row]:
        """The rows without the verdicts of unfit ones, which are saved."""
        if unfit:
            self._core.report(
                f"step {step}", "a reward is too large; its rollout is left out", step, [rows[i] for i in unfit]
            )
        return withhold(rows, unfit)

    def _skipped(self, rows: Sequence[Row], sick: Sequence[int], step: int) -> Sequence[Row]:
        """The rows; none with a verdict where some are sick, which are saved: the step is a bad one."""
        if not sick:
            return rows
        self._core.bad(f"step {step}", "a log-prob or a value is not finite", step, [rows[i] for i in sick])
        return withhold(rows, range(len(rows)))

    def _plan(self, rows: Sequence[Row], decided: Decided) -> list[Update]:
        return plan_updates(
            rollout_ids(rows),
            [len(row) for row in rows],
            decided.mask.any(1).tolist(),
            updates=self._config.train.updates_per_batch,
            epochs=self._config.train.epochs,
            ranks=self._core.ranks,
            budget=self._config.train.micro_batch_tokens,
            half_cost=self.policy.half_cost,
        )

    def _update(self, batch: _Batch, report: TrainReport) -> None:
        """Every planned update, of the critic and of the policy; what they did goes into the report."""
        plan = self._plan(batch.rows, batch.decided)
        policy, critic = self._policy_pass(batch, len(plan)), self._critic_pass(batch)
        for update in plan:
            index = self._core.counters.updates
            self._core.counters.updates += 1
            if critic is not None and update.rows:
                self._made(critic.make(update, index), critic, batch, update, index)
            if policy is not None and update.rows:
                norm = policy.make(update, self._core.rate(index))
                report.updated |= self._made(norm, policy, batch, update, index)
        for made in (policy, critic):
            report.metrics |= {} if made is None else made.metrics()

    def _critic_pass(self, batch: _Batch) -> CriticPass | None:
        if self._critic is None or not bool(batch.decided.mask.any()):
            return None
        return CriticPass(self._critic, batch.rows, batch.decided, self._tools.rank)

    def _policy_pass(self, batch: _Batch, planned: int) -> BatchPass | None:
        """None for a batch without signal, and while the critic warms up."""
        warming = self._critic is not None and self._core.counters.updates < self._config.critic.warmup_steps * planned
        if warming or not self._tools.objective.has_signal(batch.decided):
            return None
        return BatchPass(self._tools, batch.rows, batch.decided, self.version, self._kl.coef)

    def _made(self, norm: float, made: BatchPass | CriticPass, batch: _Batch, update: Update, index: int) -> bool:
        """True when the weights moved. Else the update is counted and its rows saved: those at fault, or all of it."""
        at_fault = [] if math.isfinite(norm) else made.suspects() or update.rows
        what = f"{made.who}, step {batch.step}, update {index}"
        moved = self._core.made(norm, what, batch.step, [batch.rows[i] for i in at_fault])
        if moved and isinstance(made, BatchPass):
            self._core.average()
        return moved

    def _batch_metrics(self, rows: Sequence[Row], found: Advantages, scores: Scores) -> dict[str, float]:
        """advantage/* and kl/* over trained tokens of valid rollouts; counts of rollouts and groups that gave nothing."""
        objective = self._tools.objective
        mask = trained_mask(rows) & found.valid[:, None]
        advantages = found.advantages[mask].double()
        ids = rollout_ids(rows)
        usable = {ids[i]: i for i, row in enumerate(rows) if row.total_reward is not None and row.loss_mask.any()}
        shrunk = {rows[i].group_id for i in usable.values() if not found.valid[i]}
        metrics = {"rollouts/unused": float(len(set(ids)) - len({ids[i] for i in range(len(rows)) if found.valid[i]}))}
        if objective.estimator.grouped:
            metrics["groups/shrunk"] = float(len(shrunk))
        if len(advantages):
            metrics["advantage/mean"] = float(advantages.mean())
            metrics["advantage/std"] = float(advantages.std(correction=0))
        return metrics | objective.divergences(scores, mask)

    def _state_metrics(self) -> dict[str, float]:
        """Where the trainer stands after a batch."""
        last = self._core.counters.updates - 1
        metrics = {"policy/lr": self._core.rate(last), "policy/bad_steps": float(self._core.counters.bad_steps)}
        if self._critic is not None:
            metrics["critic/lr"] = self._critic.rate(last)
        if self._config.algo.kl.coef:
            metrics["kl/coef"] = self._kl.coef
        if self._tools.device.type == "cuda":
            metrics["memory/gpu"] = float(torch.cuda.max_memory_allocated())
        return metrics

    def _steer_kl(self, rows: Sequence[Row], metrics: dict[str, float]) -> None:
        """The coefficient of the next batch, from the KL of this one; one that was not measured steers nothing."""
        if "kl/ref" in metrics and math.isfinite(metrics["kl/ref"]):
            self._kl.update(metrics["kl/ref"], len(set(rollout_ids(rows))))

    # ------------------------------------------------------------------ weights and state

    def publish(self, version: int) -> WeightSource | None:
        """See Core.publish."""
        return self._core.publish(version)

    def send(self, source: WeightSource) -> None:
        """See Core.send."""
        self._core.send(source)

    def release(self) -> None:
        """Free what `publish` gave."""
        self._core.release()

    def save(self, folder: Path) -> None:
        """Weights, their average, optimizers, random state, KL coefficient and counters into an existing folder."""
        self._core.counters.kl_coef = self._kl.coef
        self._core.save(folder)
        if self._critic is not None:
            self._critic.save(folder)

    def load(self, folder: Path) -> None:
        """The state that `save` wrote with as many ranks. Raises DataError when the folder holds another."""
        self._core.load(folder)
        if self._critic is not None:
            self._critic.load(folder)
        kl_coef = self._core.counters.kl_coef
        if kl_coef is not None and self._config.algo.kl.target is not None:
            self._kl.coef = kl_coef

    def export(self, folder: Path) -> None:
        """See Core.export."""
        self._core.export(folder)

    def offload(self) -> None:
        """Leave the GPU to the engines."""
        self._tools.backend.offload()

    def onload(self) -> None:
        """Take it back."""
        self._tools.backend.onload()

    def close(self) -> None:
        """Free what was published and leave the process group."""
        if self._critic is not None:
            self._critic.close()
        self._core.close()
