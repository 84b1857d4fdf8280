"""One served session: an env, the last step's recorded answer, and a lease."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl import wire
from agentrl.env import Task
from agentrl.env_calls import forget
from agentrl.env_session import EnvSession
from agentrl.errors import AgentRLError, DataError, EnvError
from agentrl.messages import Action, Image
from agentrl.schemas import OpenSession

from .env_offer import Offer
from .http import ApiError, as_api_error


@dataclass(frozen=True)
class Answer:
    """A reply as it is sent, each time it is asked for again. `body` is a JSON object."""

    status: int
    body: bytes


Then = Callable[[asyncio.Future[Answer]], Awaitable[None]]
"""Takes an answer that is there: a result, an exception, or cancelled since the session was closed."""


def as_answer(error: ApiError) -> Answer:
    return Answer(error.status, wire.dump(error.body()))


class PlayedSession:
    """Steps are counted from 0 and each is executed at most once: the last answer is kept and replayed.

    All methods run on the server's event loop. `touched` (loop time) is when the last call ended; the lease stands still
    while `busy`.
    """

    def __init__(self, session_id: str, offer: Offer, on_error: Callable[[AgentRLError], None]) -> None:
        self.id = session_id
        self._on_error = on_error
        self.env = EnvSession(offer.source.make, offer.timeout, offer.name)
        self.images: dict[str, Image] = {}
        self.busy = 0
        self.touched = 0.0
        self._entered = False
        self._ended = False
        self._index = -1
        self._taken = Action()
        self._answer: asyncio.Future[Answer] | None = None
        self._taking: asyncio.Task[None] | None = None

    async def open(self, request: OpenSession) -> dict[str, Any]:
        """Construct and reset: `SessionReply` without its id and lease, as plain values. Raises AgentRLError."""
        if "task" in request.options:
            raise DataError("options holds no task: it has a place of its own, beside options")
        given = None if request.task is None else wire.read_task(request.task.model_dump())
        options = request.options if given is None else {**request.options, "task": given}
        await self.env.__aenter__()
        self._entered = True
        observation, info = await self.env.reset(request.seed, options, busy_s=0.0)
        reply = {
            "observation": await self._form(observation),
            "info": info,
            "tools": await self.env.attribute("tools", None) or [],
        }
        if given is None:
            drawn = await self.env.attribute("task", None)
            if isinstance(drawn, Task):
                reply["task"] = await self.env.run("its task", lambda: wire.task_form(drawn))
        return reply

    async def _form(self, observation: Any) -> Any:
        """Pictures are encoded and hashed on the env's thread."""
        if isinstance(observation, str):
            return str(observation)
        return await self.env.run("its observation", lambda: wire.observation_form(observation, self.images))

    def step(self, index: int, form: Any, then: Then | None = None) -> tuple[asyncio.Future[Answer], bool]:
        """The answer of step `index`, and whether it begins now; else it is the recorded one. What the env raises is an answer
        too. `then` is awaited once with the answer of a step that begins now, at the end of the task that played it.

        Raises ApiError 409, and DataError for a form that is no action; then nothing was executed.
        """
        if index == self._index and self._answer is not None:
            if _spelled(wire.read_action(form)) == _spelled(self._taken):
                return self._answer, False
            raise _conflict(f"step {index} was taken with another action")
        if index <= self._index:
            raise _conflict(f"step {index} is over: the last one was {self._index}")
        if index > self._index + 1:
            raise _conflict(f"step {index} comes too early: the next one is {self._index + 1}")
        if self._answer is not None and not self._answer.done():
            raise _conflict(f"step {index} comes too early: step {self._index} is still running")
        if self._ended:
            raise _conflict(f"step {index} comes after the episode's end")
        action = wire.read_action(form)
        self._index, self._taken = index, action
        loop = asyncio.get_running_loop()
        self._answer = answer = loop.create_future()
        self._taking = loop.create_task(self._take(index, action, answer, then))
        return answer, True

    async def _take(self, index: int, action: Action, answer: asyncio.Future[Answer], then: Then | None) -> None:
        self.busy += 1
        try:
            answer.set_result(Answer(200, await self._played(index, action)))
        except AgentRLError as error:
            self._ended = True
            self._on_error(error)
            answer.set_result(as_answer(as_api_error(error)))
        except asyncio.CancelledError:  # the session was closed
            answer.cancel()
        except Exception as error:  # of this server; who waits for the answer is told
            answer.set_exception(error)
            forget(answer)
        finally:
            self.busy -= 1
            self.touched = asyncio.get_running_loop().time()
        if then is not None:
            await then(answer)

    async def _played(self, index: int, action: Action) -> bytes:
        observation, reward, terminated, truncated, info = await self.env.step(action)
        self._ended = _flag("terminated", terminated) | _flag("truncated", truncated)
        try:
            shown = observation if type(observation) is str else await self._form(observation)
        except DataError as error:
            if not self._ended:
                raise EnvError(f"{self.env.name}: {error}") from error
            shown = ""  # nobody is shown the last observation, so it may be anything
        reply = {
            "index": index,
            "observation": shown,
            "reward": wire.verdict(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": info,
        }
        return wire.dump(reply)

    async def close(self) -> None:
        """End what is running and close the env; what `close` raises is left in `env.close_error`."""
        if self._taking is not None and self._answer is not None and not self._answer.done():
            await asyncio.sleep(0)  # a task that has not begun would end without a word
            if not self._answer.done():
                self._taking.cancel()
                await asyncio.wait({self._answer})
        if self._entered:
            self._entered = False
            await self.env.__aexit__(None, None, None)


def _spelled(action: Action) -> str:
    """The same for the same action, however it was written, and for no other: 1 is not true."""
    calls = [(c.id, c.name, c.arguments, c.raw if c.arguments is None else "") for c in action.tool_calls]
    return json.dumps([str(action), calls, action.finish_reason], sort_keys=True)


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, kind="Conflict")


def _flag(what: str, value: Any) -> bool:
    try:
        return bool(value)
    except Exception as error:  # an array has no truth value
        raise EnvError(f"{what} must be True or False, not {repr(value)[:80]}") from error
