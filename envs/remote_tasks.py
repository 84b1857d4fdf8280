"""What an env server says of its envs and their tasks, read without an event loop."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any

import pydantic_core
from pydantic import ValidationError

from agentrl import wire
from agentrl.env import Task
from agentrl.errors import ConfigError
from agentrl.schemas import EnvForm, EnvsReply, TasksReply
from agentrl.task_list import TaskList

PAGE = 50
TIMEOUT_S = 30.0
WAIT_FOR_SERVER_S = 5.0


def get(url: str, path: str, token: str | None) -> Any:
    """The JSON of a GET; a server that does not listen yet is waited for. Raises ConfigError that names the flag."""
    give_up = time.monotonic() + WAIT_FOR_SERVER_S
    while True:
        try:
            status, content = _get(url, path, token)
            break
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"--env {url}: no env server answers there ({type(error).__name__}: {error})."
                ) from error
            time.sleep(0.3)
    if status == 401:
        raise ConfigError(f"--env {url} wants a token: --env.token-file FILE with the one the server was started with.")
    try:
        reply = pydantic_core.from_json(content)
    except ValueError:
        raise ConfigError(f"--env {url} is no env server: it answered {path} with status {status}.") from None
    if status != 200:
        detail = reply.get("error", {}) if isinstance(reply, dict) else {}
        raise ConfigError(f"--env {url}: {detail.get('message', f'status {status}')}")
    return reply


def _get(url: str, path: str, token: str | None) -> tuple[int, bytes]:
    address = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.netloc, timeout=TIMEOUT_S)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET", address.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def describe(url: str, name: str | None, token: str | None) -> EnvForm:
    """The env of that name; without one the only env that is served. Raises ConfigError."""
    try:
        forms = EnvsReply.model_validate(get(url, "/v1/envs", token)).envs
    except ValidationError:
        raise ConfigError(f"--env {url} is no env server of this protocol.") from None
    found = [form for form in forms if name is None or form.name == name]
    if len(found) != 1:
        known = ", ".join(form.name for form in forms) or "nothing"
        raise ConfigError(f"--env {url}/{name or ''}: the server offers {known}.")
    return found[0]


class TaskPages:
    """Reads a split's tasks page by page."""

    def __init__(self, url: str, name: str, token: str | None, split: str) -> None:
        self.url = url
        self.token = token
        self._path = f"/v1/envs/{urllib.parse.quote(name, safe='')}/tasks?split={urllib.parse.quote(split)}"

    def read(self, offset: int) -> tuple[list[Task], int | None]:
        """(up to PAGE tasks, how many there are in all if known)."""
        reply = get(self.url, f"{self._path}&offset={offset}&limit={PAGE}", self.token)
        try:
            page = TasksReply.model_validate(reply)
        except ValidationError as error:
            raise ConfigError(f"--env {self.url}: its tasks are not of this protocol: {error}") from None
        return [wire.read_task(form.model_dump()) for form in page.tasks], page.total


class RemoteTasks(TaskList):
    """A split of known size; pages are read when first looked at, and kept."""

    def __init__(self, pages: TaskPages, first: list[Task], total: int) -> None:
        self._pages = pages
        self._total = total
        self._read = {0: first}

    def __len__(self) -> int:
        return self._total

    def at(self, position: int) -> Task:
        page, place = divmod(position, PAGE)
        if page not in self._read:
            self._read[page] = self._pages.read(page * PAGE)[0]
        return self._read[page][place]


def read_tasks(pages: TaskPages) -> Iterable[Task]:
    """A Sequence where the server knows how many there are, else a stream."""
    first, total = pages.read(0)
    return RemoteTasks(pages, first, total) if total is not None else _stream(pages, first)


def _stream(pages: TaskPages, page: list[Task]) -> Iterator[Task]:
    read = 0
    while page:
        yield from page
        read += len(page)
        if len(page) < PAGE:
            return
        page, _ = pages.read(read)
