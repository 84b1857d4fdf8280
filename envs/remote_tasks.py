"""What an env server says of its envs and their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from agentrl import wire
from agentrl.env import Task
from agentrl.errors import AgentRLError, ConfigError
from agentrl.schemas import EnvForm, EnvsReply, TasksReply
from agentrl.task_list import TaskList, read_now, run_here

from .env_client import Link

FIRST_PAGE = 50
MAX_PAGE = 1000
PAGE_BYTES = 2**20
WAIT_FOR_SERVER_S = 5.0


def describe(link: Link, name: str | None, *, patient: bool = False) -> EnvForm:
    """The env of that name; without one the only env that is served. A server that does not listen yet is waited for:
    WAIT_FOR_SERVER_S, or, `patient`, for as long as an episode waits for it.

    Raises ConfigError that names the flag; patient, InfrastructureError when the server stays away.
    """
    wait_s = None if patient else WAIT_FOR_SERVER_S
    try:
        reply = run_here(lambda: link.ask("envs", patience_s=wait_s))
        forms = EnvsReply.model_validate(reply).envs
    except ConfigError:
        raise
    except AgentRLError as error:
        if patient:
            raise
        raise ConfigError(f"--env {link.url}: no env server answers there ({error}).") from error
    except ValidationError:
        raise ConfigError(f"--env {link.url} is no env server of this protocol.") from None
    found = [form for form in forms if name is None or form.name == name]
    if len(found) != 1:
        known = ", ".join(form.name for form in forms) or "nothing"
        raise ConfigError(f"--env {link.url}/{name or ''}: the server offers {known}.")
    return found[0]


class TaskPages:
    """Reads a split's tasks page by page."""

    def __init__(self, link: Link, env: str, split: str) -> None:
        self._link = link
        self._env, self._split = env, split
        self.what = f"--env {link.url}/{env}, split {split}"

    async def read(self, offset: int, limit: int) -> tuple[list[Task], int | None, int]:
        """(up to `limit` tasks, how many there are in all if known, about how many bytes a task takes)."""
        reply = await self._link.ask("tasks", env=self._env, split=self._split, offset=offset, limit=limit)
        try:
            page = TasksReply.model_validate(reply)
        except ValidationError as error:
            raise ConfigError(f"{self.what}: its tasks are not of this protocol: {error}") from None
        size = len(wire.dump(reply.get("tasks"), nan=True)) // max(1, len(page.tasks))
        return [wire.read_task(form.model_dump()) for form in page.tasks], page.total, size


class RemoteTasks(TaskList):
    """A split of known size. Pages, of about PAGE_BYTES, are read when first looked at, and kept."""

    def __init__(self, pages: TaskPages, first: list[Task], total: int, task_bytes: int) -> None:
        self._pages = pages
        self._first = first
        self._total = total
        self._page = max(1, min(MAX_PAGE, PAGE_BYTES // max(1, task_bytes)))
        self._read: dict[int, list[Task]] = {}

    def __len__(self) -> int:
        return self._total

    def at(self, position: int) -> Task:
        if position < len(self._first):
            return self._first[position]
        page, place = divmod(position, self._page)
        if page not in self._read:
            read_now(f"task {position} of {self._pages.what}", lambda: self._fetch(page))
        return self._read[page][place]

    async def _fetch(self, page: int) -> None:
        offset = page * self._page
        tasks, _, _ = await self._pages.read(offset, self._page)
        if len(tasks) < min(self._page, self._total - offset):
            raise ConfigError(
                f"{self._pages.what}: there were {self._total} tasks, now {offset + len(tasks)} are left."
            )
        self._read[page] = tasks


class RemoteStream(Iterator[Task]):
    """Tasks of which nobody knows how many there are, read in order."""

    def __init__(self, pages: TaskPages, first: list[Task]) -> None:
        self._pages = pages
        self._coming = first
        self._read = len(first)
        self._ended = len(first) < FIRST_PAGE

    def __next__(self) -> Task:
        if not self._coming and not self._ended:
            read_now(f"task {self._read} of {self._pages.what}", self._fetch)
        if not self._coming:
            raise StopIteration
        return self._coming.pop(0)

    async def _fetch(self) -> None:
        page, _, _ = await self._pages.read(self._read, FIRST_PAGE)
        self._coming = page
        self._read += len(page)
        self._ended = len(page) < FIRST_PAGE


def read_tasks(pages: TaskPages) -> Iterable[Task]:
    """A Sequence where the server knows how many there are, else a stream."""
    first, total, task_bytes = run_here(lambda: pages.read(0, FIRST_PAGE))
    return RemoteStream(pages, first) if total is None else RemoteTasks(pages, first, total, task_bytes)
