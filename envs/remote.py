"""`RemoteEnv`: an env of an env server, played as if it were here.

    env = RemoteEnv("http://127.0.0.1:8000/screenshot_math")

`agentrl train --env http://127.0.0.1:8000/screenshot_math` does the same, with the tasks that the server brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from typing import Any, ClassVar

import gymnasium
from pydantic import ValidationError

from agentrl import wire
from agentrl.backoff import pauses
from agentrl.env import Env, Task
from agentrl.errors import AgentRLError, BusyError, ConfigError, DataError, EnvError
from agentrl.messages import Image
from agentrl.registry import has_login
from agentrl.schemas import EnvForm, SessionReply, StepReply
from agentrl.tokens import read_token

from .env_client import EnvClient, Link
from .remote_tasks import TaskPages, describe, read_tasks

PATIENCE_S = 45.0
CLOSE_PATIENCE_S = 5.0
CLOSE_TIMEOUT_S = 30.0
FULL_S = 0.5
"""How long one `reset` of a served env waits for a session; it is then called again."""


class RemoteEnv(Env):
    """The client of an env server; `url` ends in the env's name, which may be left out where only one is served.

    Infrastructure that fails raises InfrastructureError, also a session that the server has lost; what the env itself
    raised is EnvError, as it is locally. `patience_s`: how long the server may be away within one call, the constructor's
    too. A server without a free session is waited for as long in `reset`, which then raises BusyError.
    """

    form: EnvForm
    link: Link
    full_s: float

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_file: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        base, name = split_url(url)
        token = token if token is not None else read_token(token_file, "--env.token-file")
        link = Link(base, token, patience_s)
        self._begin(describe(link, name, patient=True), link, patience_s)

    def _begin(self, form: EnvForm, link: Link, full_s: float) -> None:
        self.form, self.link, self.full_s = form, link, full_s
        self.tools = list(form.tools)
        self.max_turns = form.max_turns  # type: ignore[assignment]
        self._client: EnvClient | None = None
        self._session: str | None = None
        self._key: str | None = None
        self._images: dict[str, Image] = {}
        self._index = 0
        self._heart: asyncio.Task[None] | None = None

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        gymnasium.Env.reset(self, seed=seed)
        await self._leave()
        client = self._client = self._client or self.link.take()
        rest = dict(options or {})
        task = rest.pop("task", None)
        given = None if task is None else wire.task_form(task)
        opened = await self._open(client, env=self.form.name, task=given, seed=seed, options=rest)
        self._session, self._index, self._images = opened.session_id, 0, {}
        self._heart = asyncio.ensure_future(_beat(client, opened.session_id, opened.lease_s))
        self.tools = list(opened.tools)
        drawn = None if opened.task is None else wire.read_task(opened.task.model_dump())
        self.task = task if task is not None else drawn or Task(id=str(seed))
        return await self._observed(client, opened.observation), _info(opened.info)

    async def _open(self, client: EnvClient, **body: Any) -> SessionReply:
        """A session, waited for where none is free. Until its id is known it goes by its key."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.full_s
        for pause in pauses():
            self._key = secrets.token_urlsafe(16)
            try:
                opened: SessionReply = _validated(
                    SessionReply, await client.call("create", **body, idempotency_key=self._key)
                )
            except BusyError:
                self._key = None
                self.link.say_full()
                if loop.time() + pause > until:
                    raise
            else:
                return opened
            await asyncio.sleep(pause)
        raise AssertionError("there is always another pause")

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        client, session = self._client, self._session
        if client is None or session is None:
            raise EnvError("step before reset")
        reply = await client.call("step", session, index=self._index, action=wire.action_form(action))
        said = _validated(StepReply, reply)
        if said.index != self._index:
            raise EnvError(f"env server: step {self._index} was answered as step {said.index}")
        self._index += 1
        ended = said.terminated or said.truncated
        try:
            observation = await self._observed(client, said.observation)
        except EnvError:
            if not ended:
                raise
            observation = ""
        return observation, wire.verdict(said.reward), said.terminated, said.truncated, _info(said.info)

    async def close(self) -> None:  # type: ignore[override]
        """End the session on the server, also one that a `reset` which was given up has opened or is opening there. One
        that cannot be reached ends it when the lease runs out.
        """
        client, self._client = self._client, None
        if client is None:
            return
        try:
            await self._leave(client)
        finally:
            await self.link.give_back(client)

    async def _leave(self, client: EnvClient | None = None) -> None:
        client, session = client or self._client, self._session or self._key
        self._session = self._key = None
        if self._heart is not None:
            self._heart.cancel()
        if client is not None and session is not None:
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await client.call("close", session, patience_s=CLOSE_PATIENCE_S)

    async def _observed(self, client: EnvClient, form: Any) -> Any:
        try:
            for sha in dict.fromkeys(wire.unsent_images(form, self._images)):
                wire.read_image(await client.call("image", sha256=sha), self._images)
            return wire.read_observation(form, self._images)
        except DataError as error:
            raise EnvError(f"env server: {error}") from error


async def _beat(client: EnvClient, session: str, lease_s: float) -> None:
    """Renew the lease for as long as the session lasts."""
    while True:
        await asyncio.sleep(lease_s / 3)
        try:
            await client.call("heartbeat", session, patience_s=lease_s / 3)
        except AgentRLError:
            return  # the next call finds out what it is


def _info(info: dict[str, Any]) -> dict[str, Any]:
    """Metrics that are null were NaN, which are left out."""
    metrics = info.get("metrics")
    if not isinstance(metrics, dict):
        return info
    return {**info, "metrics": {key: value for key, value in metrics.items() if value is not None}}


def _validated(model: Any, reply: dict[str, Any]) -> Any:
    try:
        return model.model_validate(reply)
    except ValidationError as error:
        raise EnvError(f"the env server's answer is not of this protocol: {error}") from None


def split_url(url: str) -> tuple[str, str | None]:
    """(address of the server, name of the env or None). Raises ConfigError."""
    scheme, separator, rest = url.rstrip("/").partition("://")
    host, _, name = rest.rpartition("/")
    if not separator or scheme not in ("http", "https") or not rest:
        raise ConfigError(f"--env {url}: an env server's address is http://host:port/name.")
    if has_login(url):
        raise ConfigError("--env: no name or password in the address; a token goes into --env.token-file.")
    return (f"{scheme}://{host}", name) if host else (f"{scheme}://{rest}", None)


def served(url: str, token_file: str | None = None, patient: bool = False) -> type[RemoteEnv]:
    """The env class behind a URL: `--env http://…`. The server is asked once, and waited for as `describe` says; all its envs
    in a process share a stream.
    """
    base, name = split_url(url)
    shared = Link(base, read_token(token_file, "--env.token-file"), PATIENCE_S)
    found = describe(shared, name, patient=patient)

    class Served(RemoteEnv):
        form: ClassVar[EnvForm] = found  # type: ignore[misc]
        link: ClassVar[Link] = shared  # type: ignore[misc]
        max_turns = found.max_turns  # type: ignore[assignment]
        tools = list(found.tools)

        def __init__(self) -> None:
            self._begin(type(self).form, type(self).link, FULL_S)

        @classmethod
        def tasks(cls, split: str = "train") -> Iterable[Task]:  # type: ignore[override]
            """The tasks that the server brings."""
            return read_tasks(TaskPages(shared, found.name, split))

    if not found.splits:
        del Served.tasks
    Served.__name__ = Served.__qualname__ = found.name
    Served.__doc__ = found.description
    return Served
