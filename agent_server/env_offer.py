"""The environments a server offers: what each is like, and its tasks page by page."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentrl import wire
from agentrl.assemble import EnvSource
from agentrl.env import Task
from agentrl.env_calls import EnvThread, blame_env
from agentrl.env_session import EnvSession
from agentrl.errors import DataError
from agentrl.schemas import EnvForm

SPLITS = ("train", "test")
OTHER = ""
MAX_SKIPPED = 100_000


class Offer:
    """One env under its name. User code (`tasks`) runs on threads of its own, never on the event loop: one for each split that
    every env may have, one for all others. A call that is over its time keeps its thread until it returns.
    """

    def __init__(self, source: EnvSource, call_timeout_s: float) -> None:
        self.source = source
        self.name = source.name
        self.timeout = call_timeout_s
        self.form = EnvForm(name=self.name)
        self._looked = False
        self._threads = {split: EnvThread(f"tasks of {self.name}") for split in (*SPLITS, OTHER)}
        self._splits: dict[str, Iterable[Task]] = {}
        self._streams: dict[str, tuple[int, Iterator[Task]]] = {}

    async def look(self) -> None:
        """Make one env, read its facts, close it; once. Raises EnvError or ConfigError."""
        if self._looked:
            return
        async with EnvSession(self.source.make, self.timeout, self.name) as env:
            turns = await env.attribute("max_turns", None)
            tools = await env.attribute("tools", None) or []
            own = self.source.target if isinstance(self.source.target, type) else None
            described = own or type(await env.attribute("unwrapped", None))
        self._looked = True
        counts = {split: await self._run(split, lambda split=split: self._size(split)) for split in SPLITS}
        self.form = EnvForm(
            name=self.name,
            description=inspect.cleandoc(described.__doc__ or "").strip(),
            tools=list(tools),
            max_turns=turns,
            splits=[split for split, count in counts.items() if count != 0],
            task_counts={split: count for split, count in counts.items() if count != 0},
        )

    async def page(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """`TasksReply` as plain values."""
        tasks, total = await self._run(split, lambda: self._page(split, offset, limit))
        return {"tasks": tasks, "offset": offset, "total": total}

    async def _run(self, split: str, call: Any) -> Any:
        thread = self._threads.get(split, self._threads[OTHER])
        return await blame_env(f"{self.name}: tasks", thread.run(call, self.timeout), self.timeout)

    def _tasks(self, split: str) -> Iterable[Task]:
        if split not in self._splits:
            self._splits[split] = self.source.tasks(split)
        return self._splits[split]

    def _size(self, split: str) -> int | None:
        tasks = self._tasks(split)
        return len(tasks) if isinstance(tasks, Sequence) else None

    def _page(self, split: str, offset: int, limit: int) -> tuple[list[Any], int | None]:
        if split not in (*SPLITS, *self._splits):
            tasks: Iterable[Task] = self.source.tasks(split)
        else:
            tasks = self._tasks(split)
        if isinstance(tasks, Sequence):
            return [wire.task_form(task) for task in tasks[offset : offset + limit]], len(tasks)
        return [wire.task_form(task) for task in self._read_on(split, offset, limit)], None

    def _read_on(self, split: str, offset: int, limit: int) -> list[Task]:
        """A page of a stream: read on from the last page, or from the start when another is asked for."""
        at, stream = self._streams.pop(split, (0, iter(())))
        if offset > at + MAX_SKIPPED:
            raise DataError(f"{self.name}: the tasks of {split} are a stream, to be read page by page")
        if at != offset or at == 0:
            stream = itertools.islice(iter(self.source.tasks(split)), offset, None)
        page = list(itertools.islice(stream, limit))
        self._streams[split] = (offset + len(page), stream)
        return page
