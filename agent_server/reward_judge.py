"""What a reward server judges with: a function that takes one completion, or one that takes many at once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.env import Task
from agentrl.env_calls import EnvThread, blame_env, run_async
from agentrl.errors import AgentRLError, ConfigError, EnvError, InfrastructureError
from agentrl.registry import accepted_options
from agentrl.reward import Verdict, read_verdict

MANY = ("prompts", "completions", "labels", "queries", "spelled")
ONE = ("prompt", "completion", "label", "row", "images", "task")


@dataclass(frozen=True)
class Item:
    """One completion to judge. `query` = prompt and completion as the policy spelled them, where that is known."""

    prompt: Any
    completion: str
    label: Any
    query: str | None = None


class Judge:
    """Calls a reward function; a sync one off the event loop, and one that hangs loses its thread.

    A function that takes one completion runs for up to `max_batch` of them at once. One that names any of MANY is given lists
    and judges up to `max_batch` completions at once, whichever requests they come from: while one batch is judged, the next
    one gathers. `queries` are prompt and completion together, `spelled` = as the policy's template spelled them. When
    `max_batch` calls hang, no further one begins until one of them returns.
    """

    def __init__(self, function: Callable[..., Any], name: str, timeout_s: float, max_batch: int) -> None:
        self.function = function
        self.name = name
        self.timeout = timeout_s
        self.max_batch = max_batch
        named = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        self.takes_many = any(parameter in MANY for parameter in inspect.signature(function).parameters)
        unknown = [one for one in _required(function) if one not in (MANY if self.takes_many else ONE)]
        if unknown or not named:
            offered = f"{', '.join(ONE)}, or lists: {', '.join(MANY)}"
            raise ConfigError(f"--fn {name} wants {', '.join(unknown) or 'nothing'}; it is given by name: {offered}.")
        self.calls = 0
        self._slots = asyncio.Semaphore(max_batch)
        self._hanging: list[EnvThread] = []
        self._waiting: list[tuple[Item, asyncio.Future[Verdict]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """In order. Raises EnvError for what the function raises or returns wrongly, InfrastructureError when too much hangs."""
        if self.takes_many:
            return await self._gathered(items)
        verdicts = await asyncio.gather(*(self._one(item) for item in items), return_exceptions=True)
        for verdict in verdicts:
            if isinstance(verdict, BaseException):
                raise verdict
        return [verdict for verdict in verdicts if isinstance(verdict, Verdict)]

    async def _one(self, item: Item) -> Verdict:
        task = Task("", item.prompt, item.label)
        given = {"prompt": item.prompt, "completion": item.completion, "label": item.label}
        async with self._slots:
            return read_verdict(await self._call({**given, "row": {}, "images": (), "task": task}))

    async def _gathered(self, items: Sequence[Item]) -> list[Verdict]:
        loop = asyncio.get_running_loop()
        coming = [loop.create_future() for _ in items]
        for future in coming:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting += zip(items, coming, strict=True)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.ensure_future(self._work())
        return list(await asyncio.gather(*coming))

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
            batch = [(item, future) for item, future in batch if not future.done()]
            verdicts = await self._many([item for item, _ in batch]) if batch else []
            for (_, future), verdict in zip(batch, verdicts, strict=True):
                if future.done():
                    continue
                if isinstance(verdict, AgentRLError):
                    future.set_exception(verdict)
                else:
                    future.set_result(verdict)

    async def _many(self, items: Sequence[Item]) -> Sequence[Verdict | AgentRLError]:
        """The fault boundary: a failing call fails the completions it was for."""
        try:
            return _read_many(await self._call(_lists(items)), len(items), self.name)
        except AgentRLError as error:
            return [error] * len(items)

    async def _call(self, offered: Mapping[str, Any]) -> Any:
        given = accepted_options(self.function, offered)
        what = f"reward {self.name}"
        self._refuse_hanging(what)
        self.calls += 1
        if inspect.iscoroutinefunction(self.function):
            return await blame_env(what, run_async(lambda: self.function(**given), self.timeout), self.timeout)
        thread = EnvThread(what)
        try:
            outcome = await blame_env(what, thread.run(lambda: self.function(**given), self.timeout), self.timeout)
        finally:
            thread.end()
            self._hanging += [thread] if thread.lost else []
        if inspect.isawaitable(outcome):
            return await blame_env(what, run_async(lambda: outcome, self.timeout), self.timeout)
        return outcome

    def _refuse_hanging(self, what: str) -> None:
        self._hanging = [thread for thread in self._hanging if thread.lost]
        if len(self._hanging) >= self.max_batch:
            raise InfrastructureError(
                f"{what}: {len(self._hanging)} calls hang, each on a thread, and no more are begun"
            )


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def _lists(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "prompts": [item.prompt for item in items],
        "completions": [item.completion for item in items],
        "labels": [item.label for item in items],
        "queries": [_joined(item) if item.query is None else item.query for item in items],
        "spelled": [item.query is not None for item in items],
    }


def _joined(item: Item) -> str:
    return f"{item.prompt if isinstance(item.prompt, str) else ''}{item.completion}"


def _read_many(result: Any, n: int, name: str) -> list[Verdict]:
    """A list with a verdict for each, or `{"rewards", "scores"?}`; arrays and tensors are lists. Raises EnvError."""
    if isinstance(result, Mapping):
        rewards, scores = _listed(result.get("rewards")), _listed(result.get("scores"))
        if isinstance(rewards, list) and isinstance(scores, list) and len(scores) == len(rewards):
            rewards = [{"reward": r, "score": s} for r, s in zip(rewards, scores, strict=True)]
    else:
        rewards = _listed(result)
    if not isinstance(rewards, list) or len(rewards) != n:
        raise EnvError(f"reward {name} must return a list of {n} rewards, not {repr(result)[:80]}")
    return [read_verdict(reward) for reward in rewards]


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value
