"""A reward function that asks reward servers.

`http://a:9000,http://b:9000` is one reward with two servers: each question goes to the one with the fewest open ones, and to
another while that one rests. A server that fails or is full rests for a while, longer each time, and is then asked one question.
A failure is nobody's verdict: the episode is repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pydantic_core
from pydantic import ValidationError

from . import wire
from .backoff import retry_after
from .env import Task
from .errors import ConfigError, EnvError, InfrastructureError
from .schemas import RewardReply

PATIENCE_S = 45.0
"""How long all servers of a reward may fail, as long as an env server."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 3.0
TIMEOUT_S = 600.0
CHECK_S = 20.0


def served_reward(spec: str, token: str | None) -> Callable[..., Awaitable[Any]]:
    """The reward function behind one or several URLs. Raises ConfigError for an address that is none."""
    urls = [url.strip().rstrip("/") for url in spec.split(",")]
    for url in urls:
        if not url.startswith(("http://", "https://")) or "@" in url:
            raise ConfigError(f"--reward {spec}: an address is http://host:port, several are separated by commas.")
    servers = RewardServers(urls, token)

    async def served(prompt: Any, completion: str, label: Any) -> Any:
        return await servers.ask(prompt, completion, label)

    return served


async def check_reward_servers(spec: str, token: str | None) -> None:
    """Asks every server for nothing, so that a wrong address or token is known before a model loads. Raises ConfigError."""
    body = wire.dump({"prompts": [], "completions": [], "labels": []})
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(CHECK_S)) as http:
        for url in spec.split(","):
            try:
                status, reply, _ = await _post(http, f"{url.strip().rstrip('/')}/v1/reward", body)
                if status != 200 and status < 500:
                    _refused(url, status, reply)
            except (aiohttp.ClientError, OSError) as error:
                raise ConfigError(
                    f"--reward {url}: no reward server answers there ({type(error).__name__})."
                ) from error
            except EnvError as error:
                raise ConfigError(f"--reward {url} is no reward server: {error}") from error


class RewardServers:
    """Servers of one reward. May be asked from any event loop; connections are kept while questions are open."""

    def __init__(self, urls: list[str], token: str | None) -> None:
        self.urls = urls
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._open = dict.fromkeys(urls, 0)
        self._failures = dict.fromkeys(urls, 0)
        self._rests_until = dict.fromkeys(urls, 0.0)
        self._http: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, int]]
        self._http = weakref.WeakKeyDictionary()

    async def ask(self, prompt: Any, completion: str, label: Any) -> Any:
        """`{"reward", "score", "metrics"}`. Raises EnvError for what the reward itself raised or cannot take, else
        InfrastructureError.
        """
        form = wire.task_form(Task("", prompt, label))
        body = wire.dump(
            {"prompts": [form["prompt"]], "completions": [completion], "labels": [form["label"]]}, nan=True
        )
        http = self._take()
        try:
            return await self._ask(http, body)
        finally:
            await self._give_back()

    async def _ask(self, http: aiohttp.ClientSession, body: bytes) -> Any:
        until, wait = time.monotonic() + PATIENCE_S, BACKOFF_S
        for attempt in itertools.count(1):
            url = min(self.urls, key=lambda one: (self._resting(one), self._open[one]))
            self._open[url] += 1
            try:
                status, reply, after = await _post(http, f"{url}/v1/reward", body)
            except (aiohttp.ClientError, OSError) as error:
                status, reply, after, what = 0, {}, 0.0, f"{url}: {type(error).__name__}: {error}"
            finally:
                self._open[url] -= 1
            if status == 200:
                self._failures[url] = 0
                return _verdict(url, reply)
            if status:
                what = _refused(url, status, reply)
            self._rest(url, after)
            if attempt % len(self.urls) == 0:
                pause = max(after, wait)
                if time.monotonic() + pause > until:
                    raise InfrastructureError(f"no reward server answers: {what}")
                await asyncio.sleep(pause)
                wait = min(2 * wait, MAX_BACKOFF_S)
        raise AssertionError("there is always another attempt")

    def _resting(self, url: str) -> float:
        """Seconds until a server may be asked; one that failed last time is asked one question at a time."""
        tried = MAX_BACKOFF_S if self._failures[url] and self._open[url] else 0.0
        return max(tried, self._rests_until[url] - time.monotonic(), 0.0)

    def _rest(self, url: str, after: float) -> None:
        self._failures[url] += 1
        pause = min(BACKOFF_S * 2 ** min(self._failures[url], 10), MAX_BACKOFF_S)
        self._rests_until[url] = time.monotonic() + max(after, pause)

    def _take(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        http, users = self._http.get(loop, (None, 0))
        if http is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=10.0)
            http = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        self._http[loop] = (http, users + 1)
        return http

    async def _give_back(self) -> None:
        loop = asyncio.get_running_loop()
        http, users = self._http[loop]
        self._http[loop] = (http, users - 1)
        if users == 1:
            del self._http[loop]
            await http.close()


async def _post(http: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, Mapping[str, Any], float]:
    """(status, reply, seconds to wait before another try)."""
    headers = {"Content-Type": "application/json"}
    async with http.post(url, data=body, headers=headers, allow_redirects=False) as response:
        content, after = await response.read(), response.headers.get("Retry-After", "")
    try:
        reply = pydantic_core.from_json(content)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        return (502 if response.status < 400 else response.status), {}, 0.0
    return response.status, reply, retry_after(after)


def _refused(url: str, status: int, reply: Mapping[str, Any]) -> str:
    """What a failure that may pass says. Raises what will not pass: EnvError, or ConfigError without the right token."""
    given = reply.get("error")
    error = given if isinstance(given, dict) else {}
    message = f"{url}: {error.get('message', f'status {status}')}"
    if status == 401:
        raise ConfigError(f"reward server {url} wants a token: --env.token-file FILE with the one it was started with.")
    if status != 429 and (status < 500 or (error and error.get("retryable") is not True)):
        raise EnvError(f"reward server {message}")
    return message


def _verdict(url: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    try:
        read = RewardReply.model_validate(reply)
    except ValidationError as error:
        raise EnvError(f"reward server {url}: its answer is not of this protocol: {error}") from None
    if len(read.rewards) != 1:
        raise EnvError(f"reward server {url} gave {len(read.rewards)} rewards for one completion")
    verdict: dict[str, Any] = {"reward": read.rewards[0]}
    if read.scores:
        verdict["score"] = read.scores[0]
    if read.metrics:
        verdict["metrics"] = read.metrics[0]
    return verdict
