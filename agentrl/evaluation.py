"""Evaluation on held-out tasks, with sampling and seeds of its own; it never changes training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from .config import Config
from .engine import Limits, Sampling
from .env import Task
from .errors import InfrastructureError
from .report.metrics import Metrics, evaluation_metrics
from .rollout.dispatcher import Player
from .rollout.episode import EpisodeOrder, EpisodeResult, failed
from .seeds import derive


class Evaluator:
    """Plays the first `eval.tasks` held-out tasks, sampled and (unless switched off) greedily.

    The same tasks and seeds every time, so that two evaluations differ by the weights alone. pass@k is reported for `ks`
    (None: 1 and `eval.n`); `seen` gets every result as it comes.
    """

    def __init__(
        self,
        config: Config,
        player: Player,
        tasks: Iterable[Task],
        limits: Limits,
        *,
        ks: Sequence[int] | None = None,
        seen: Callable[[EpisodeResult], None] | None = None,
    ) -> None:
        self.config = config
        self.player = player
        self.tasks = list(itertools.islice(tasks, config.eval.tasks))
        self.limits = limits
        self.ks = sorted({1, config.eval.n} if ks is None else set(ks))
        self.seen = seen

    @property
    def episodes(self) -> int:
        """Episodes of one evaluation."""
        return len(self.tasks) * (self.config.eval.n + self._greedy)

    @property
    def _greedy(self) -> bool:
        return self.config.eval.greedy and self.config.eval.temperature > 0

    async def run(self) -> Metrics:
        """eval/… of this moment's weights; what is not back after eval.timeout_s is excluded and counted."""
        options = self.config.eval
        sampled = Sampling(
            temperature=options.temperature,
            max_new_tokens=self.limits.max_new_tokens,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
        )
        found = await self._play(sampled, options.n, self.ks, "")
        if self._greedy:
            greedy = Sampling(temperature=0.0, max_new_tokens=self.limits.max_new_tokens)
            found |= await self._play(greedy, 1, [1], "greedy/")
        return {f"eval/{key}": value for key, value in found.items()}

    async def _play(self, sampling: Sampling, n: int, ks: Sequence[int], prefix: str) -> Metrics:
        orders = [self._order(i, sample, task, sampling) for i, task in enumerate(self.tasks) for sample in range(n)]
        episodes = {asyncio.create_task(self._one(order)): order for order in orders}
        try:
            done, late = await asyncio.wait(episodes, timeout=self.config.eval.timeout_s)
        finally:
            for episode in episodes:
                episode.cancel()
        results = [episode.result() for episode in done]
        results += [failed(episodes[episode], InfrastructureError("evaluation timed out")) for episode in late]
        return {f"{prefix}{key}": value for key, value in evaluation_metrics(results, ks).items()}

    async def _one(self, order: EpisodeOrder) -> EpisodeResult:
        try:
            result = await self.player.play(order)
        except InfrastructureError as error:
            result = failed(order, error)
        if self.seen is not None:
            self.seen(result)
        return result

    def _order(self, index: int, sample: int, task: Task, sampling: Sampling) -> EpisodeOrder:
        seed = self.config.run.seed
        return EpisodeOrder(
            rollout_id=f"eval-{index:05d}-{sample}",
            group_id=f"eval-{index:05d}",
            draw=index,
            sample=sample,
            task=task,
            env_seed=derive(seed, "eval env", index),
            seed=derive(seed, "eval", index, sample),
            sampling=sampling,
            limits=self.limits,
            engine=index % self.config.engine.count,
            training=False,
        )
