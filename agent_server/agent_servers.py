"""The trainer's side of the agent protocol: orders episodes of agent servers and waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from agentrl.engine import Limits
from agentrl.env import Task
from agentrl.errors import AgentError, ConfigError, InfrastructureError
from agentrl.schemas import TaskForm
from agentrl.wire import task_form

from .agent_wire import EpisodeReply, EpisodeRequest, PolicyAccess

POLL_S = 20.0
"""How long one question may wait at the agent server for the end of an episode."""
CONNECT_S = 5.0
ANSWER_S = 10.0
"""How long an answer may take beyond that."""
BACKOFF_S = (0.25, 0.5, 1.0, 2.0)
"""Pauses before a question is asked again that no server answered."""
AVOID_S = 30.0
"""How long a server that was not there is asked last."""
CANCEL_S = 3.0
REFUSING = (404, 405, 429, 503)
"""Statuses of a server that does not take an order; one to which agents are unknown too, or a proxy that has lost its server."""
UNSURE = (502, 504)
"""Statuses of something in front of the server, which may have taken it."""


class _NotTakenError(Exception):
    """The server did not take the episode: it is not there, or full."""


@dataclass(eq=False)
class _Place:
    """One agent server. `avoid_until` is a monotonic time."""

    url: str
    load: int = 0
    avoid_until: float = 0.0


class AgentServers:
    """Agent servers behind one door: the least loaded one that answers takes the next episode."""

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        if not urls:
            raise ConfigError("--agent: give the URL of at least one agent server.")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"--agent {url}: an agent server's URL begins with http:// or https://.")
        self._places = [_Place(url.rstrip("/")) for url in urls]
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._name = secrets.token_hex(6)
        self._attempts: Counter[str] = Counter()

    async def play(
        self, rollout_id: str, task: Task, policy: PolicyAccess, limits: Limits, metrics: dict[str, float]
    ) -> dict[str, Any]:
        """What the agent said of its work: reward, score, metrics as far as it said them. What went wrong on the way is counted
        in `metrics`. Raises AgentError when the agent failed, InfrastructureError when its server did.
        """
        attempt = self._attempts[rollout_id]
        self._attempts[rollout_id] += 1
        request = EpisodeRequest(
            episode_id=f"{self._name}-{rollout_id}",
            attempt=attempt,
            task=TaskForm.model_validate(task_form(task)),
            policy=policy,
            limits=dict(vars(limits)),
            idempotency_key=secrets.token_hex(16),
        )
        async with aiohttp.ClientSession(headers=self._headers) as http:
            return await _Order(http, request, metrics).placed(self._places)


class _Order:
    """One attempt at one episode."""

    def __init__(self, http: aiohttp.ClientSession, request: EpisodeRequest, metrics: dict[str, float]) -> None:
        self.http = http
        self.request = request
        self.metrics = metrics

    async def placed(self, places: list[_Place]) -> dict[str, Any]:
        """Every server is asked, the least loaded first, several times over."""
        for pause in (*BACKOFF_S, None):
            for place in sorted(places, key=lambda place: (place.avoid_until > time.monotonic(), place.load)):
                place.load += 1
                try:
                    return await self._at(place)
                except _NotTakenError as error:
                    place.avoid_until = time.monotonic() + AVOID_S
                    why = f"{place.url}: {error}"
                finally:
                    place.load -= 1
            if pause is not None:
                await asyncio.sleep(pause)
        raise InfrastructureError(f"no agent server takes episodes; the last one: {why}")

    async def _at(self, place: _Place) -> dict[str, Any]:
        url = f"{place.url}/v1/episodes"
        try:
            status, body = await self._ordered(place, url)
            while status == 202:
                status, body = await self._patiently(place, f"{url}/{self.request.episode_id}")
        except _NotTakenError:
            raise
        except BaseException:
            await self._cancel(f"{url}/{self.request.episode_id}")
            raise
        return self._outcome(place, status, body)

    async def _ordered(self, place: _Place, url: str) -> tuple[int, Any]:
        """What the server says to the order. One that may have taken it is asked again, and no other server under the same key:
        two agents would play one episode. Raises _NotTakenError for one that has not taken it.
        """
        unsure = False
        for pause in (*BACKOFF_S, None):
            try:
                status, body = await self._ask("POST", url, {}, json=self.request.model_dump())
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                why = _named(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                why, unsure = _named(error), True
            else:
                if status not in (*REFUSING, *UNSURE):
                    return status, body
                why, unsure = f"HTTP {status}", unsure or status in UNSURE
            if not unsure:
                raise _NotTakenError(why)
            if pause is not None:
                await asyncio.sleep(pause)
        raise self._lost(place, why)

    async def _patiently(self, place: _Place, url: str) -> tuple[int, Any]:
        """The episode's state, after at most POLL_S. A server that is lost for good costs the attempt."""
        for pause in (*BACKOFF_S, None):
            try:
                return await self._ask("GET", url, {"wait_s": f"{POLL_S:g}", "attempt": str(self.request.attempt)})
            except (aiohttp.ClientError, TimeoutError) as error:
                lost = _named(error)
            if pause is not None:
                await asyncio.sleep(pause)
        raise self._lost(place, lost)

    def _lost(self, place: _Place, why: str) -> InfrastructureError:
        place.avoid_until = time.monotonic() + AVOID_S
        return InfrastructureError(f"the agent server {place.url} was lost in mid-episode: {why}")

    async def _ask(self, method: str, url: str, query: dict[str, str], **body: Any) -> tuple[int, Any]:
        """(status, JSON or None)."""
        timeout = aiohttp.ClientTimeout(total=POLL_S + ANSWER_S, sock_connect=CONNECT_S)
        async with self.http.request(method, url, params=query, timeout=timeout, **body) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None

    def _outcome(self, place: _Place, status: int, body: Any) -> dict[str, Any]:
        if status == 200:
            return self._read(place, body)
        error = {"message": None, "retryable": False, **_error(body)}
        message = error["message"]
        said = f"{place.url}: HTTP {status}: {message or 'no explanation'}"
        if status == 401:
            raise ConfigError(f"the agent server wants another token (--agent.token-file). {said}")
        if status == 404:
            raise InfrastructureError(f"the agent server forgot the episode. {said}")
        if status == 409:
            raise self._another_attempt(said)
        if status >= 500 and (not message or error["retryable"]):
            raise InfrastructureError(f"an agent server was lost in mid-episode. {said}")
        raise AgentError(said)

    def _read(self, place: _Place, body: Any) -> dict[str, Any]:
        try:
            reply = EpisodeReply.model_validate(body if body is not None else {})
        except ValidationError as error:
            raise AgentError(f"{place.url}: the agent's answer cannot be read: {error.errors()[0]['msg']}") from error
        if reply.attempt is not None and reply.attempt != self.request.attempt:
            raise self._another_attempt(f"{place.url}: attempt {reply.attempt} instead of {self.request.attempt}")
        return reply.outcome()

    def _another_attempt(self, said: str) -> InfrastructureError:
        self.metrics["agent/other_attempt"] = self.metrics.get("agent/other_attempt", 0.0) + 1.0
        return InfrastructureError(f"the agent server answers for another attempt. {said}")

    async def _cancel(self, url: str) -> None:
        """Tell the server that nobody waits any more; it may not be there to hear it."""
        asking = self._ask("DELETE", url, {"attempt": str(self.request.attempt)})
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await asyncio.wait_for(asking, CANCEL_S)


def _error(body: Any) -> dict[str, Any]:
    """The `error` of an answer; empty where it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
