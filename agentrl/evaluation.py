"""Evaluation on held-out tasks, with sampling and seeds of its own; it never changes training."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .config import Config
from .engine import Limits, Sampling
from .engines.keeper import EngineKeeper
from .env import Task
from .errors import EngineError, InfrastructureError
from .report.metrics import Metrics, evaluation_metrics, metrics_by_env
from .rollout.episode import EpisodeOrder, EpisodeResult, failed
from .rollout.orders import evaluation_order
from .rollout.player import Player, play_once, repeated
from .rollout.seats import Seats

FIRST = -1
"""In the place of a draw where episodes wait for a seat: the next weights wait for the held-out ones."""


class Evaluator:
    """Plays held-out tasks, sampled and (unless switched off) greedily. Of tasks of several datasets, whose ids are
    `NAME/…`, everything is reported for each as well.

    The same tasks and seeds every time, so that two evaluations differ by the weights alone. pass@k is reported for `ks`
    (None: 1 and `eval.n`); `seen` gets every result as it comes. `seats` are those of the training episodes beside it.

    With a `keeper`, an episode that lost its engine is played again on one that serves the same weights: another, or the
    one that takes its place, which can get them only until the trainer has others (`engines_back`).
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
        seats: Seats | None = None,
        keeper: EngineKeeper | None = None,
    ) -> None:
        self.config = config
        self.player = player
        self.tasks = list(tasks)
        self.limits = limits
        self.ks = sorted({1, config.eval.n} if ks is None else set(ks))
        self.seen = seen
        self.seats = seats or Seats(config.engine.count, config.rollout.max_episodes)
        self.keeper = keeper
        self._weights_gone = asyncio.Event()
        self._waiting = 0
        self._none_waits = asyncio.Event()
        self._none_waits.set()

    @property
    def episodes(self) -> int:
        """Episodes of one evaluation."""
        return len(self.tasks) * (self.config.eval.n + self._greedy)

    @property
    def _greedy(self) -> bool:
        return self.config.eval.greedy and self.config.eval.temperature > 0

    async def run(self) -> Metrics:
        """eval/… of this moment's weights; what is not back after eval.timeout_s is excluded and counted."""
        sampled = self._orders(self._sampling(), self.config.eval.n)
        greedy = self._orders(Sampling(temperature=0.0, max_new_tokens=self.limits.max_new_tokens), 1)
        try:
            results = await self._play([*sampled, *(greedy if self._greedy else [])])
        finally:
            self._weights_gone.clear()
        found = self._metrics(sampled, results[: len(sampled)], self.ks)
        if self._greedy:
            of_greedy = self._metrics(greedy, results[len(sampled) :], [1])
            found |= {f"greedy/{key}": value for key, value in of_greedy.items()}
        return {f"eval/{key}": value for key, value in found.items()}

    def _metrics(self, orders: Sequence[EpisodeOrder], results: Sequence[EpisodeResult], ks: Sequence[int]) -> Metrics:
        """Of all the episodes, of each of several environments, and under `NAME/…` of each of several datasets."""
        envs = self.config.env.labels.values()
        by_env = metrics_by_env(envs, results, lambda own: evaluation_metrics(own, ks))
        found = evaluation_metrics(results, ks) | by_env
        if len(self.config.data.test_path) < 2:
            return found
        sets: dict[str, list[EpisodeResult]] = defaultdict(list)
        for order, result in zip(orders, results, strict=True):
            sets[order.task.id.rpartition("/")[0]].append(result)
        each = {f"{name}/{key}": v for name, some in sets.items() for key, v in evaluation_metrics(some, ks).items()}
        return found | each

    def _sampling(self) -> Sampling:
        options = self.config.eval
        return Sampling(
            temperature=options.temperature,
            max_new_tokens=self.limits.max_new_tokens,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
        )

    def _orders(self, sampling: Sampling, n: int) -> list[EpisodeOrder]:
        return [
            evaluation_order(self.config, self.limits, i, sample, task, sampling)
            for i, task in enumerate(self.tasks)
            for sample in range(n)
        ]

    async def _play(self, orders: Sequence[EpisodeOrder]) -> list[EpisodeResult]:
        """Results in the order of the orders."""
        episodes = [asyncio.create_task(self._one(order)) for order in orders]
        try:
            await asyncio.wait(episodes, timeout=self.config.eval.timeout_s)
        finally:
            back = [episode.done() for episode in episodes]
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        late = InfrastructureError("evaluation timed out")
        return [
            episode.result() if done else failed(order, late)
            for episode, done, order in zip(episodes, back, orders, strict=True)
        ]

    async def engines_back(self) -> None:
        """To be awaited before the trainer changes its weights: returns when no episode waits for an engine any more. One
        that loses the last engine after that cannot be played again.
        """
        await self._none_waits.wait()
        self._weights_gone.set()

    async def _one(self, order: EpisodeOrder) -> EpisodeResult:
        result = await repeated(self._attempt, order, self.config.rollout.retries)
        if self.seen is not None:
            self.seen(result)
        return result

    async def _attempt(self, order: EpisodeOrder) -> EpisodeResult:
        while True:
            try:
                engine = await self._engine_for(order)
            except EngineError as error:
                return failed(order, error)
            async with self.seats.one(engine, (FIRST, order.draw)):
                if self.keeper is None or self.keeper.instead(engine) == engine:
                    return await play_once(self.player, replace(order, engine=engine))

    async def _engine_for(self, order: EpisodeOrder) -> int:
        """An engine that serves the evaluated weights. Raises EngineError when none will."""
        while self.keeper is not None and (engine := self.keeper.instead(order.engine)) != order.engine:
            if engine is not None:
                return engine
            if self._weights_gone.is_set():
                raise EngineError(
                    "the last engine with the evaluated weights is lost, and the trainer has others by now"
                )
            await self._replaced(self.keeper, order.engine)
        return order.engine

    async def _replaced(self, keeper: EngineKeeper, engine: int) -> None:
        """Until the engine is back, or will not be back with these weights."""
        self._waiting += 1
        self._none_waits.clear()
        back, gone = asyncio.ensure_future(keeper.ready(engine)), asyncio.ensure_future(self._weights_gone.wait())
        try:
            await asyncio.wait([back, gone], return_when=asyncio.FIRST_COMPLETED)
            if back.done():
                back.result()
        finally:
            back.cancel()
            gone.cancel()
            self._waiting -= 1
            if not self._waiting:
                self._none_waits.set()


class BackgroundEvaluation:
    """The evaluation of one version's weights, played while training goes on. `over` is awaited before the engines get
    other weights, so its episodes are of a single version.
    """

    def __init__(self, evaluator: Evaluator | None) -> None:
        self.evaluator = evaluator
        self.last_step = -1
        self._at = (0, 0)
        self._playing: asyncio.Task[Metrics] | None = None

    @property
    def episodes(self) -> int:
        """Episodes of the evaluation that has begun; 0 when none has."""
        return 0 if self.evaluator is None or self._playing is None else self.evaluator.episodes

    def begin(self, step: int, version: int) -> None:
        """Evaluate the weights of `step`, unless that has been done."""
        if self.evaluator is not None and self.last_step != step:
            self.last_step, self._at = step, (step, version)
            self._playing = asyncio.create_task(self.evaluator.run())

    async def engines_back(self) -> None:
        """Before the trainer changes its weights: engines that are lost get the evaluated ones first."""
        if self.evaluator is not None and self._playing is not None and not self._playing.done():
            await self.evaluator.engines_back()

    async def over(self) -> Metrics | None:
        """Its record once it has come to its end, within eval.timeout_s; None when none was begun since the last call."""
        if self._playing is None:
            return None
        found = await asyncio.shield(self._playing)
        self._playing = None
        step, version = self._at
        return {"step": step, "version": version, **found, "eval/version": float(version)}

    async def cancel(self) -> None:
        """Give it up; it may be begun again."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
            self._playing, self.last_step = None, -1
