"""`ToolEnv`: an environment whose methods are the model's tools.

    class Adder(ToolEnv):
        @tool
        def add(self, a: int, b: int) -> int:
            \"\"\"Add two numbers.\"\"\"
            return a + b

        def reward(self, answer: Action) -> float:
            return float(str(self.task.label) in answer)

Whatever the model writes, the episode goes on: a call that cannot be run is answered by an error text under its own id,
runs nothing, and is counted in `info["metrics"]`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar, cast

from PIL import Image as PILImage
from pydantic_core import to_json

from .env import Env
from .errors import EnvError, InfrastructureError
from .messages import Action, Image, Message, Observation, Text, ToolCall, as_part, normalize
from .registry import suggest
from .tool_schema import ArgumentsError, ToolSchema, tool_schema

COUNTS = (
    "tool_calls",
    "tool_errors/malformed",
    "tool_errors/unknown",
    "tool_errors/arguments",
    "tool_errors/empty",
    "tool_errors/raised",
)
EMPTY_REPLY = "Error: your reply was empty."
_MARK = "agentrl_tool"
_Method = TypeVar("_Method", bound=Callable[..., Any])
StepResult = tuple[Observation, float | None, bool, bool, dict[str, Any]]


def tool(method: _Method) -> _Method:
    """Mark a method (plain or `async def`) of a `ToolEnv` as a tool; its signature and docstring are what the model reads.

    A str result is the observation as it is; a picture, or a list of parts with one in it, is shown; anything else is
    written as JSON. What it raises is told to the model, except EnvError and InfrastructureError: these fail the episode.
    """
    setattr(method, _MARK, True)
    return method


class ToolEnv(Env):
    """Write methods marked `@tool`, `reward`, and if need be `tasks`.

    `messages` is the conversation so far, the model's turns and tool results included. `metrics` are this episode's
    numbers, reported at every step: the `COUNTS`, and whatever a tool adds. An instance may narrow `tools` in its
    constructor; what it does not offer is unknown to the model.

    `step` is `async def` as soon as a tool, `reward`, `reset` or `close` is: the async calls of one turn then run
    concurrently, and its sync tools one after the other on a thread of their own, off the event loop. With no async
    method it is a plain gymnasium env, whose calls run in order on the caller's thread.
    """

    system: ClassVar[str | None] = None
    messages: list[Message]
    metrics: dict[str, float]
    abandoned_calls: int = 0
    """Sync tools that were not back when their turn was given up: each still holds a thread."""
    _toolbox: ClassVar[dict[str, ToolSchema]] = {}
    _is_async: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._toolbox = {name: _schema(method) for name, method in _marked(cls).items()}
        cls.tools = [schema.as_openai() for schema in cls._toolbox.values()]
        cls._is_async = any(_is_coroutine(getattr(cls, name)) for name in (*cls._toolbox, "reward", "reset", "close"))
        if "reset" in vars(cls):
            cls.reset = _recorded(cls.reset)  # type: ignore[method-assign]
        if cls._is_async and cls.step is ToolEnv.step:
            cls.step = ToolEnv._async_step  # type: ignore[method-assign]

    @classmethod
    def from_mcp(
        cls, target: str | Sequence[str], *, only: Sequence[str] | None = None, timeout_s: float = 30.0
    ) -> type[ToolEnv]:
        """A subclass that has an MCP server's tools beside its own: of a URL, or of a command that is started an episode.

        The server is asked for its tools here and now; `only` names those to take, `timeout_s` bounds a call. A `close` of
        the subclass must call `super().close()`. A server that is gone fails the episode as infrastructure. Raises
        ConfigError.
        """
        from .tool_mcp import McpTools, list_tools, mcp_methods

        methods = mcp_methods(list_tools(target, timeout_s, only), _MARK, lambda name: hasattr(cls, name))
        body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "mcp_target": target, "mcp_timeout_s": timeout_s}
        return cast(type[ToolEnv], type(cls.__name__, (McpTools, cls), {**body, **methods}))

    def reward(self, answer: Action) -> Any:
        """The verdict on the episode: a float, None, or `{"reward", "score", "metrics"}`. May be `async def`.

        Called once, with the model's last turn: text without a call, or whatever it wrote in the last turn allowed or
        when it was cut by length (`answer.finish_reason`). Tools called in that turn have run.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reward(answer)")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The task's images and prompt as the user's message, after `system` if there is one."""
        prompt, info = super().reset(seed=seed, options=options)
        limit = (options or {}).get("max_turns")
        self._turns_left = self.max_turns if limit is None else min(limit, self.max_turns)
        self._ended = False
        self._sync_tools = asyncio.Lock()
        self.metrics = dict.fromkeys(COUNTS, 0.0)
        if isinstance(prompt, str) and self.task.images:
            prompt = [*map(Image, self.task.images), Text(prompt)]
        if self.system is not None:
            prompt = [{"role": "system", "content": self.system}, *normalize(prompt)]
        self.messages = normalize(prompt)
        return prompt, info

    def step(self, action: Action | str) -> Any:
        """Run the turn's calls, or take its text as the answer. Every turn but the last gives reward None.

        Raises EnvError when the episode is over.
        """
        turn = self._play(action)
        return turn if self._is_async else _finished(turn)

    async def _async_step(self, action: Action | str) -> StepResult:
        return await self._play(action)

    async def _play(self, action: Action | str) -> StepResult:
        """One turn. In an env without async methods this never suspends."""
        if self._ended:
            raise EnvError(f"{type(self).__name__}.step was called after the episode ended")
        action = action if isinstance(action, Action) else Action(action)
        self._turns_left -= 1
        self.messages.append(assistant_message(action))
        observation = await self._observe(action)
        self.messages.extend(observation)
        cut = action.finish_reason != "stop"
        answered = not action.tool_calls and bool(action.strip()) and not cut
        if not (answered or cut or self._turns_left <= 0):
            return observation, None, False, False, {"metrics": dict(self.metrics)}
        self._ended = True
        reward, info = self._verdict(await self._invoke(self.reward, action))
        return observation or "", reward, answered, not answered, info

    async def _observe(self, action: Action) -> list[Message]:
        calls = action.tool_calls
        if calls:
            self.metrics["tool_calls"] += len(calls)
            contents = await self._run_all(calls)
            return [
                {"role": "tool", "tool_call_id": call.id, "content": content}
                for call, content in zip(calls, contents, strict=True)
            ]
        if not action.strip():
            self.metrics["tool_errors/empty"] += 1
            return [{"role": "user", "content": EMPTY_REPLY}]
        return []

    async def _run_all(self, calls: Sequence[ToolCall]) -> list[Any]:
        if not self._is_async:
            return [await self._run(call) for call in calls]
        running = [asyncio.ensure_future(self._run(call)) for call in calls]
        try:
            return list(await asyncio.gather(*running))
        except BaseException:
            # No tool outlives its turn: what comes next is `close`.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def _run(self, call: ToolCall) -> str | list[Any]:
        """The content of the message that answers one call."""
        offered = {entry["function"]["name"] for entry in self.tools} & self._toolbox.keys()
        if call.arguments is None:
            return self._refuse(
                "malformed", f"the arguments{' of ' * bool(call.name)}{call.name} are not a JSON object."
            )
        if call.name not in offered:
            near = suggest(call.name, offered)
            return self._refuse(
                "unknown", f"there is no tool {call.name!r}.{near} Tools: {', '.join(sorted(offered))}."
            )
        try:
            arguments = self._toolbox[call.name].validate(call.arguments)
            return as_content(await self._invoke(getattr(self, call.name), **arguments))
        except ArgumentsError as error:
            return self._refuse("arguments", f"wrong arguments for {call.name}: {error}")
        except (EnvError, InfrastructureError):
            raise
        except Exception as error:
            # The fault boundary of a call: the model asked for it, so the model is told.
            return self._refuse("raised", f"{type(error).__name__}: {error}")

    def _refuse(self, kind: str, text: str) -> str | list[Any]:
        self.metrics[f"tool_errors/{kind}"] += 1
        return as_content(f"Error: {text}")

    async def _invoke(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call user code: on this thread, or off the event loop when there is one and the code is sync."""
        if self._is_async and not _is_coroutine(function):
            async with self._sync_tools:
                result = await self._off_loop(functools.partial(function, *args, **kwargs))
        else:
            result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def _off_loop(self, function: Callable[[], Any]) -> Any:
        try:
            return await _off_loop(function)
        except asyncio.CancelledError:
            self.abandoned_calls += 1
            raise

    def _verdict(self, value: Any) -> tuple[float | None, dict[str, Any]]:
        given = value if isinstance(value, dict) else {"reward": value}
        unknown = given.keys() - {"reward", "score", "metrics"}
        if unknown or "reward" not in given:
            raise EnvError(
                f"reward returned keys {sorted(given)}: 'reward' is needed, 'score' and 'metrics' are allowed"
            )
        self.metrics.update({name: _number(name, number) for name, number in (given.get("metrics") or {}).items()})
        info: dict[str, Any] = {"metrics": dict(self.metrics)}
        if given.get("score") is not None:
            info["score"] = _number("score", given["score"])
        return (None if given["reward"] is None else _number("reward", given["reward"])), info


def assistant_message(action: Action) -> Message:
    """The model's turn in OpenAI's form; `arguments` are the text it wrote, malformed or not."""
    message: Message = {"role": "assistant", "content": str(action)}
    if action.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
            for call in action.tool_calls
        ]
    return message


def as_content(result: Any) -> str | list[Any]:
    """Message content of what a tool returned: a str, or a list of parts if there is a picture or `Text` part in it."""
    if isinstance(result, str):
        # JSON may escape half of a surrogate pair, which no tokenizer takes.
        return result.encode(errors="replace").decode()
    if isinstance(result, Image | PILImage.Image):
        return [as_part(result)]
    parts = result if isinstance(result, list | tuple) else ()
    shown = any(isinstance(part, Image | PILImage.Image | Text) for part in parts)
    if shown and all(isinstance(part, Image | PILImage.Image | str) for part in parts):
        return [as_part(part) for part in parts]
    return to_json(result, fallback=str).decode()


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError("a str")
        return float(value)
    except (TypeError, ValueError) as error:
        raise EnvError(f"reward returned {value!r:.100} as {name}, which is no number") from error


def _marked(cls: type[ToolEnv]) -> dict[str, Callable[..., Any]]:
    """The tools of a class and its bases, in the order they were written. Raises TypeError on what can be no tool."""
    found: dict[str, Callable[..., Any]] = {}
    for owner in reversed(cls.__mro__):
        for name, value in vars(owner).items():
            if hasattr(value, _MARK):
                if not inspect.isfunction(value) or hasattr(ToolEnv, name):
                    raise TypeError(
                        f"{owner.__name__}.{name} cannot be a tool: mark a plain method with a name of its own"
                    )
                found[name] = value
            elif value is None:
                found.pop(name, None)
            elif name in found:
                raise TypeError(f"{owner.__name__}.{name} replaces a tool: mark it @tool, or write {name} = None")
    return found


def _schema(method: Any) -> Any:
    """A tool's schema: the one it was marked with, else what its signature says."""
    mark = getattr(method, _MARK)
    return tool_schema(method) if mark is True else mark


def _recorded(reset: Callable[..., Any]) -> Callable[..., Any]:
    """A user's `reset` that also leaves what it returned in `self.messages`."""

    def record(env: ToolEnv, result: Any) -> Any:
        if isinstance(result, tuple) and len(result) == 2:
            env.messages = normalize(result[0])
        return result

    @functools.wraps(reset)
    def recorded(self: ToolEnv, **options: Any) -> Any:
        return record(self, reset(self, **options))

    @functools.wraps(reset)
    async def recorded_async(self: ToolEnv, **options: Any) -> Any:
        return record(self, await reset(self, **options))

    return recorded_async if _is_coroutine(reset) else recorded


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def _finished(turn: Coroutine[Any, Any, StepResult]) -> StepResult:
    """The result of a coroutine that has nothing to wait for. Raises EnvError when it does wait."""
    try:
        turn.send(None)
    except StopIteration as done:
        return cast(StepResult, done.value)
    turn.close()
    raise EnvError("a tool or reward that is not `async def` returned something to await: declare it `async def`")


async def _off_loop(function: Callable[[], Any]) -> Any:
    """Run sync code on a daemon thread: one that never returns holds up neither the event loop nor the exit."""
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            settled, outcome = False, error
        else:
            settled, outcome = True, result
        if done.set_running_or_notify_cancel():
            done.set_result((settled, outcome))

    threading.Thread(target=run, name="agentrl-tool", daemon=True).start()
    returned, outcome = await asyncio.wrap_future(done)
    if not returned:
        raise outcome
    return outcome
