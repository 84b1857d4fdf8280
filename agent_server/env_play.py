"""One served session: an env, the last step's recorded answer, and a lease."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl import wire
from agentrl.env import Task
from agentrl.env_session import EnvSession
from agentrl.errors import AgentRLError, DataError, EnvError
from agentrl.messages import Action, Image
from agentrl.schemas import OpenSession

from .env_offer import Offer
from .http import ApiError, as_api_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A reply as it is sent, each time it is asked for again. `body` is a JSON object."""

    status: int
    body: bytes


async def recorded(answer: Answer | asyncio.Future[Answer]) -> Answer:
    """The answer of a step that began before, once it is there."""
    return answer if isinstance(answer, Answer) else await asyncio.shield(answer)


def as_answer(error: ApiError) -> Answer:
    return Answer(error.status, wire.dump(error.body()))


CLOSED = as_answer(ApiError(404, "the session was closed", kind="UnknownSession"))


def failure(error: BaseException) -> Answer:
    """The answer to a call that this server failed at."""
    if isinstance(error, ApiError):
        return as_answer(error)
    log.error("a call failed in the server", exc_info=error)
    return as_answer(ApiError(500, f"{type(error).__name__} in the server", kind="ServerError"))


class PlayedSession:
    """Steps are counted from 0 and each is executed at most once: the last answer is kept and replayed.

    All methods run on the server's event loop. `index` is that of the last step that began, -1 before the first; `touched`
    (loop time) is when the last call ended; the lease stands still while `busy`.
    """

    def __init__(self, session_id: str, offer: Offer, on_error: Callable[[AgentRLError], None]) -> None:
        self.id = session_id
        self._on_error = on_error
        self.env = EnvSession(offer.source.make, offer.timeout, offer.name)
        self.images: dict[str, Image] = {}
        self.index = -1
        self.busy = 0
        self.touched = 0.0
        self._loop = asyncio.get_running_loop()
        self._entered = False
        self._ended = False
        self._taken = Action()
        self._answer: Answer | None = None
        self._coming: asyncio.Future[Answer] | None = None
        self._taking: asyncio.Task[Any] | None = None

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

    def begin(self, index: int, form: Any) -> Answer | asyncio.Future[Answer] | None:
        """None: step `index` begins, and the caller has it played with `play`. Else it began before, and this is its answer, for
        `recorded`.

        Raises ApiError 409, and DataError for a form that is no action; then nothing is executed.
        """
        if index == self.index >= 0:
            if _spelled(wire.read_action(form)) == _spelled(self._taken):
                return self._answer or self._awaited()
            raise _conflict(f"step {index} was taken with another action")
        if index <= self.index:
            raise _conflict(f"step {index} is over: the last one was {self.index}")
        if index > self.index + 1:
            raise _conflict(f"step {index} comes too early: the next one is {self.index + 1}")
        if self._running:
            raise _conflict(f"step {index} comes too early: step {self.index} is still running")
        if self._ended:
            raise _conflict(f"step {index} comes after the episode's end")
        action = wire.read_action(form)
        self.index, self._taken, self._answer, self._coming = index, action, None, None
        self._taking = None
        return None

    @property
    def _running(self) -> bool:
        return self._answer is None and self.index >= 0

    def _awaited(self) -> asyncio.Future[Answer]:
        """The answer that is not there yet."""
        if self._coming is None:
            self._coming = self._loop.create_future()
        return self._coming

    async def play(self) -> Answer:
        """Play the step that has begun. What the env raises is an answer too. Never raises, and a cancellation ends here: it is
        `close` that cancels.
        """
        self.busy += 1
        self._taking = asyncio.current_task(self._loop)
        assert self._taking is not None
        try:
            answer = Answer(200, await self._played(self.index, self._taken))
        except AgentRLError as error:
            self._ended = True
            self._on_error(error)
            answer = as_answer(as_api_error(error))
        except asyncio.CancelledError:  # the session was closed
            self._taking.uncancel()
            answer = CLOSED
        except Exception as error:
            answer = failure(error)
        self.busy -= 1
        self.touched = self._loop.time()
        self._answer = answer
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(answer)
        return answer

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
        if self._running:
            await asyncio.sleep(0)  # the task that is to play it may not have begun
            if self._running:
                assert self._taking is not None
                self._taking.cancel()
                await asyncio.wait({self._awaited()})
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
