"""A language model as a reward function: `--reward judge.toml`, over any OpenAI-compatible URL.

Its answers are kept in a file that all rollout workers share, so no question is paid for twice, and the calls are counted
there; above temperature 0, where it may answer better, one that could not be read is asked again. A judge that fails, says
nothing that can be read, or is over its budget gives no verdict, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field, field_validator

from .backoff import retry_after
from .config.load import read_file, validated
from .config.section import Section
from .errors import ConfigError
from .messages import message_text, normalize
from .registry import has_login
from .tokens import read_token

log = logging.getLogger(__name__)
AGAIN = (408, 409, 429)
"""What a server refuses that it may take later; its own failures, from 500 on, are such as well."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
LOCK_S = 30.0


class JudgeFile(Section):
    """What a judge.toml holds."""

    url: str
    """The API's base address, as in http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model at that address."""
    prompt: str
    """What the judge is asked; {prompt}, {completion} and {label} stand for those of the episode."""
    system: str | None = None
    """A system message before it."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regular expression of the score: the first group of its last match in the answer."""
    low: float = 0.0
    """The lowest score; it becomes reward 0. Scores out of range are no verdict."""
    high: float = 10.0
    """The highest score; it becomes reward 1."""
    max_calls: int = Field(10_000, ge=1)
    """Calls that may be paid for in all; they are counted in the cache file."""
    cache: str | None = None
    """File with the answers so far; absent: beside this file, with the ending .sqlite."""
    token_file: str | None = None
    """File with the API key."""
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    retries: int = Field(4, ge=0)
    """Attempts after the first where the server is busy or gone."""
    timeout_s: float = Field(60.0, gt=0)
    at_once: int = Field(16, ge=1)
    """Most calls of one rollout worker at once."""

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"this is no regular expression: {error}") from error
        if groups < 1:
            raise ValueError("the score is the pattern's first group, and it has none")
        return pattern


def read_judge(path: str) -> JudgeFile:
    """The judge of a file. Raises ConfigError."""
    judge = validated(JudgeFile, read_file(path, "--reward"), path)
    if has_login(judge.url):
        raise ConfigError(f"{path}: no name or password in url; the API's key goes into token_file.")
    if not judge.low < judge.high:
        raise ConfigError(f"{path}: low {judge.low:g} must be below high {judge.high:g}.")
    if "{completion}" not in judge.prompt:
        raise ConfigError(f"{path}: prompt must show the judge the {{completion}}.")
    return judge


def judge_reward(path: str) -> Callable[..., Awaitable[dict[str, Any]]]:
    """The reward function of a judge.toml. Raises ConfigError."""
    judge = Judge(read_judge(path), Path(path))

    async def judged(prompt: Any, completion: str, label: Any) -> dict[str, Any]:
        return await judge.verdict(prompt, completion, label)

    return judged


class Judge:
    """Asks for verdicts and keeps the answers. May be used from any event loop."""

    def __init__(self, file: JudgeFile, path: Path) -> None:
        self._file = file
        self._answers = Answers(Path(file.cache) if file.cache else path.with_suffix(".sqlite"), file.max_calls)
        token = read_token(file.token_file, f"{path}: token_file")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._asking: dict[tuple[int, str], asyncio.Task[str | None]] = {}
        self._seats: dict[int, asyncio.Semaphore] = {}
        self._warned: set[str] = set()

    async def verdict(self, prompt: Any, completion: str, label: Any) -> dict[str, Any]:
        """`{"reward", "metrics"}`; reward None = no verdict, and a metric says why."""
        body = self._question(prompt, completion, label)
        key = hashlib.sha256(json.dumps([self._file.url, body], sort_keys=True).encode()).hexdigest()
        answer = self._answers.get(key)
        cached = answer is not None and not (self._file.temperature and self._read(answer)["reward"] is None)
        if not cached:
            answer = await self._shared(key, body)
        found = self._read(answer) if answer is not None else {"reward": None}
        return {**found, "metrics": {"judge/cached": float(cached), "judge/failed": float(found["reward"] is None)}}

    async def _shared(self, key: str, body: dict[str, Any]) -> str | None:
        """Equal questions that are open at once are one call."""
        place = (id(asyncio.get_running_loop()), key)
        if place not in self._asking:
            task = asyncio.ensure_future(self._paid(key, body))
            self._asking[place] = task
            task.add_done_callback(lambda done: self._asking.pop(place, None))
        return await asyncio.shield(self._asking[place])

    async def _paid(self, key: str, body: dict[str, Any]) -> str | None:
        loop = id(asyncio.get_running_loop())
        async with self._seats.setdefault(loop, asyncio.Semaphore(self._file.at_once)):
            answer = await self._asked(body)
        if answer is not None:
            self._answers.put(key, answer)
        return answer

    async def _asked(self, body: dict[str, Any]) -> str | None:
        """The answer's text, None when there is none to be had. Every attempt is counted."""
        why = ""
        for attempt in range(self._file.retries + 1):
            if not self._answers.pay():
                why = f"max_calls {self._file.max_calls} are used up"
                break
            try:
                timeout = aiohttp.ClientTimeout(self._file.timeout_s)
                async with (
                    aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http,
                    http.post(f"{self._file.url.rstrip('/')}/chat/completions", json=body) as response,
                ):
                    text, after = await response.text(), retry_after(response.headers.get("Retry-After", ""))
                if response.status == 200:
                    return str(json.loads(text)["choices"][0]["message"]["content"] or "")
                why = f"HTTP {response.status}: {text[:200]}"
                if response.status not in AGAIN and response.status < 500:
                    break
            except (aiohttp.ClientError, TimeoutError) as error:
                after = 0.0
                why = f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError) as error:
                why = f"no chat completion: {type(error).__name__}"
                break
            if attempt < self._file.retries:
                await asyncio.sleep(max(after, min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S)))
        self._gave_up(why)
        return None

    def _gave_up(self, why: str) -> None:
        """Said once for each cause: the episodes carry it as judge/failed."""
        if why not in self._warned:
            self._warned.add(why)
            log.warning("the judge at %s gives no verdict: %s", self._file.url, why)

    def _question(self, prompt: Any, completion: str, label: Any) -> dict[str, Any]:
        shown = prompt if isinstance(prompt, str) else _transcript(prompt)
        given = {"{prompt}": shown, "{completion}": completion, "{label}": "" if label is None else str(label)}
        asked = re.sub(r"\{prompt\}|\{completion\}|\{label\}", lambda match: given[match.group()], self._file.prompt)
        system = [{"role": "system", "content": self._file.system}] if self._file.system else []
        return {
            "model": self._file.model,
            "messages": [*system, {"role": "user", "content": asked}],
            "temperature": self._file.temperature,
            "max_tokens": self._file.max_tokens,
        }

    def _read(self, answer: str) -> dict[str, Any]:
        """The reward in an answer, 0 to 1; None where it has no score in range."""
        found = [match.group(1) for match in re.finditer(self._file.pattern, answer)]
        try:
            score = float(found[-1]) if found else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not self._file.low <= score <= self._file.high:
            return {"reward": None}
        return {"reward": (score - self._file.low) / (self._file.high - self._file.low)}


def _transcript(prompt: Any) -> str:
    messages = normalize(prompt if prompt is not None else "")
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in messages)


class Answers:
    """Answers by question, and the number of calls so far, in a file that several processes may use at once."""

    def __init__(self, path: Path, max_calls: int) -> None:
        self._path = path
        self._max_calls = max_calls

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own each time: connections belong to one thread. Committed at the end."""
        connection = sqlite3.connect(self._path, timeout=LOCK_S)
        try:
            with connection:
                connection.execute("create table if not exists answers (key text primary key, answer text)")
                connection.execute(
                    "create table if not exists calls (id integer primary key check (id = 0), n integer)"
                )
                connection.execute("insert or ignore into calls values (0, 0)")
                yield connection
        finally:
            connection.close()

    def get(self, key: str) -> str | None:
        with self._open() as connection:
            row = connection.execute("select answer from answers where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._open() as connection:
            connection.execute("insert or replace into answers values (?, ?)", (key, answer))

    def pay(self) -> bool:
        """Count a call; False when that would be one too many."""
        with self._open() as connection:
            changed = connection.execute("update calls set n = n + 1 where n < ?", (self._max_calls,)).rowcount
        return changed == 1
