"""What can be found wrong with an environment before any model plays it."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import gymnasium
from gymnasium.utils.env_checker import check_env

from .env import Task
from .env_sync import sync
from .messages import Action, Image, ToolCall, message_images, normalize

Level = Literal["ok", "warning", "error"]
EnvFactory = Callable[[], gymnasium.Env[Any, Any]]

CHECKED_TASKS = 1000
CHECKED_EPISODES = 3
LONG_REPLY_CHARS = 200_000

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# None is a legal reward here, the checker's own wrapper is no fault of the env, and chat has nothing to render.
_IRRELEVANT = ("reward returned by", "is different from the unwrapped version", "alternative render modes")


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `message` says what was found, and at `warning` and `error` what to do."""

    level: Level
    message: str


def bad_actions() -> dict[str, Action | str]:
    """What a model does write sooner or later, by a name to show."""
    cut = ToolCall("call_cut", "", None, '{"name": "add", "arguments": {"a": 1,')
    stranger = ToolCall("call_unknown", "no_such_tool", {}, "{}")
    return {
        "an empty reply": Action(""),
        "garbage": Action("\x00\ufffd ]]} <|im_end|> \\u12"),
        "a malformed tool call": Action("", tool_calls=[cut]),
        "an unknown tool": Action("", tool_calls=[stranger]),
        "a cut reply": Action("The answer is", finish_reason="length"),
        "a very long reply": Action("9" * LONG_REPLY_CHARS),
        "a plain str": "42",
    }


def check(env_factory: EnvFactory, tasks: Iterable[Task], seeds: Sequence[int]) -> list[Finding]:
    """Play fresh envs with scripted actions and report. Whatever the env raises becomes a finding.

    Looks at the first `CHECKED_TASKS` tasks, and plays the first `CHECKED_EPISODES` of them (or, without tasks, what
    `reset` draws), one per seed. Async envs are checked through their sync view. Takes the envs' own time: about
    twenty episodes.
    """
    findings: list[Finding] = []
    listed: list[Task] = []
    with _fault(findings, "reading the tasks"):
        listed.extend(islice(tasks, CHECKED_TASKS))
    findings += check_tasks(listed)
    played: list[Task | None] = [*listed[:CHECKED_EPISODES]] or [None]
    episodes = [(played[i % len(played)], seed) for i, seed in enumerate(seeds)] or [(played[0], 0)]
    episodes = episodes[:CHECKED_EPISODES]
    findings += _check_gymnasium(env_factory, *episodes[0])
    for task, seed in episodes:
        findings += _check_determinism(env_factory, task, seed)
    findings += _check_bad_actions(env_factory, *episodes[0])
    findings += _check_close(env_factory, *episodes[0])
    return findings


def check_tasks(tasks: Sequence[Task]) -> list[Finding]:
    """Ids unique, and every task the same after a trip to another process."""
    if not tasks:
        return [Finding("warning", "The env brings no tasks: give data, or define `tasks`.")]
    strangers = [type(task).__name__ for task in tasks if not isinstance(task, Task)]
    if strangers:
        return [Finding("error", f"`tasks` gave {strangers[0]}, not agentrl.Task.")]
    findings = []
    doubles = [name for name, times in Counter(task.id for task in tasks).items() if times > 1]
    if doubles:
        findings.append(Finding("error", f"{len(doubles)} task ids are used more than once, {doubles[0]!r} first."))
    for task in tasks:
        problem = _travels(task)
        if problem:
            findings.append(Finding("error", f"Task {task.id!r} does not travel to a worker: {problem}."))
            break
    return findings or [Finding("ok", f"{len(tasks)} tasks looked at: ids are unique, labels survive pickling.")]


def _travels(task: Task) -> str:
    """Why a task does not survive pickling, or ''."""
    try:
        copy = pickle.loads(pickle.dumps(task))
    except Exception as error:
        # A fault boundary: what `__reduce__` of a user's label raises can be anything.
        return f"{type(error).__name__}: {error}"
    if type(copy.label) is not type(task.label):
        return f"the label comes back as {type(copy.label).__name__}, not {type(task.label).__name__}"
    return ""


class _Seated(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The env with its task given at every reset."""

    def __init__(self, env: gymnasium.Env[Any, Any], task: Task | None) -> None:
        super().__init__(env)
        self._given = {} if task is None else {"task": task}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options={**self._given, **(options or {})})


@contextmanager
def _fault(findings: list[Finding], doing: str) -> Iterator[None]:
    """The fault boundary of an env under check: what its code raises is an error finding that says where."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        findings.append(Finding("error", f"It raised when {doing}: {type(error).__name__}: {error} ({where})."))


@contextmanager
def _seated(env_factory: EnvFactory, task: Task | None) -> Iterator[_Seated]:
    env = _Seated(sync(env_factory()), task)
    try:
        yield env
    finally:
        env.close()


def _check_gymnasium(env_factory: EnvFactory, task: Task | None, seed: int) -> list[Finding]:
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _fault(findings, "checked by gymnasium"), _seated(env_factory, task) as env:
            check_env(env, skip_render_check=True)
    for text in dict.fromkeys(_COLOURS.sub("", str(warning.message)) for warning in caught):
        if not any(phrase in text for phrase in _IRRELEVANT):
            findings.append(Finding("warning", f"gymnasium: {text.removeprefix('WARN: ')}"))
    return findings or [Finding("ok", "gymnasium's check_env passes.")]


@dataclass(frozen=True)
class _Played:
    """An episode as comparable values, and the image sizes seen in it."""

    turns: tuple[tuple[Any, ...], ...]
    sizes: tuple[tuple[int, int], ...]


def _play(env: _Seated, seed: int) -> _Played:
    """One episode of scripted actions. Raises ValueError where a result breaks the contract."""
    observation, _ = env.reset(seed=seed)
    turns: list[tuple[Any, ...]] = [(_fingerprint(observation),)]
    images = message_images(normalize(observation))
    for action in bad_actions().values():
        observation, reward, terminated, truncated, info = env.step(action)
        _check_reward(reward)
        if not isinstance(info, dict):
            raise ValueError(f"`step` gave {type(info).__name__} as info, not a dict")
        turns.append((_fingerprint(observation), None if reward is None else float(reward), terminated, truncated))
        images += message_images(normalize(observation))
        if terminated or truncated:
            break
    return _Played(tuple(turns), tuple(dict.fromkeys(image.size for image in images)))


def _check_reward(reward: Any) -> None:
    if reward is not None and (isinstance(reward, str | bool) or not math.isfinite(float(reward))):
        raise ValueError(f"`step` gave the reward {reward!r}: a finite float, or None for no verdict")


def _fingerprint(observation: Any) -> str:
    """A hash of an observation, pictures by their pixels. Raises DataError when it is none."""
    digest = hashlib.sha256()
    for message in normalize(observation):
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        shown = [part.sha256 if isinstance(part, Image) else repr(part) for part in parts]
        rest = {key: value for key, value in message.items() if key != "content"}
        digest.update(repr((sorted(rest.items()), shown)).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _check_determinism(env_factory: EnvFactory, task: Task | None, seed: int) -> list[Finding]:
    """Two fresh envs under one seed and the same actions see and earn the same."""
    findings: list[Finding] = []
    named = f"task {task.id!r}, seed {seed}" if task else f"seed {seed}"
    played: list[_Played] = []
    with _fault(findings, f"playing {named}"):
        for _ in range(2):
            with _seated(env_factory, task) as env:
                played.append(_play(env, seed))
    if len(played) < 2:
        return findings
    first, second = played
    for turn, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        if one != other:
            what = "observation" if one[0] != other[0] else "reward or end"
            where = "reset" if turn == 0 else f"step {turn}"
            reason = f"Not deterministic under a seed ({named}): the {what} of {where} differs between two fresh envs."
            return [*findings, Finding("warning", f"{reason} Draw from `self.np_random`.")]
    sizes = ", ".join(f"{width}x{height}" for width, height in first.sizes)
    shown = f" Image sizes (width x height): {sizes}." if sizes else ""
    return [*findings, Finding("ok", f"Deterministic under a seed ({named}), observations are well-formed.{shown}")]


def _check_bad_actions(env_factory: EnvFactory, task: Task | None, seed: int) -> list[Finding]:
    findings: list[Finding] = []
    for name, action in bad_actions().items():
        with _fault(findings, f"given {name}"), _seated(env_factory, task) as env:
            env.reset(seed=seed)
            result = env.step(action)
            _check_reward(result[1])
            normalize(result[0])
    return findings or [Finding("ok", f"Bad actions do not raise: {', '.join(bad_actions())}.")]


def _check_close(env_factory: EnvFactory, task: Task | None, seed: int) -> list[Finding]:
    """`close` works before and after an episode; a second call is allowed, as gymnasium's wrappers may make one."""
    findings: list[Finding] = []
    with _fault(findings, "closed before `reset`"):
        sync(env_factory()).close()
    with _fault(findings, "closed"):
        env = _Seated(sync(env_factory()), task)
        env.reset(seed=seed)
        env.close()
        twice: list[Finding] = []
        with _fault(twice, "closed a second time"):
            env.close()
        findings += [Finding("warning", finding.message) for finding in twice]
    return findings or [Finding("ok", "`close` works, also twice and before `reset`.")]
