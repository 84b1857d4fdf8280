"""The calls of the env server, whichever way they come in: sessions, their leases and slots, and the images they showed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from agentrl import wire
from agentrl.env_calls import CallTimeoutError
from agentrl.errors import AgentRLError, BusyError, DataError, error_class
from agentrl.schemas import OpenSession, StepRequest

from .env_offer import SPLITS, Offer
from .env_play import Answer, PlayedSession, recorded
from .http import ApiError, as_api_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvLimits:
    """`sessions` at once, those being closed or held by a call that never returned included; times in seconds."""

    sessions: int = 4096
    lease_s: float = 600.0
    call_timeout_s: float = 60.0


class _Steps(Collector):
    """`agentrl_env_steps_total`, read from plain numbers: a counter's lock would be a part of every step."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = steps

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("agentrl_env_steps", "Steps taken", labels=["env"])
        for name, steps in self.steps.items():
            family.add_metric([name], steps)
        yield family


class EnvService:
    """All methods run on one event loop. Calls raise ApiError; an env's own failure is the recorded answer of its step."""

    def __init__(self, offers: Iterable[Offer], limits: EnvLimits, registry: CollectorRegistry) -> None:
        self.offers = {offer.name: offer for offer in offers}
        self.limits = limits
        self._sessions: dict[str, PlayedSession] = {}
        self._opening: dict[str, tuple[OpenSession, asyncio.Task[Answer]]] = {}
        self._keys: dict[str, str] = {}
        self._pending = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._lost: list[PlayedSession] = []
        self._steps = dict.fromkeys(self.offers, 0)
        registry.register(_Steps(self._steps))
        self._errors = Counter("agentrl_env_errors", "Failed calls of an env", ["env", "class"], registry=registry)
        self._expired = Counter("agentrl_env_leases_expired", "Sessions whose lease ran out", registry=registry)
        Gauge("agentrl_env_sessions", "Open sessions", registry=registry).set_function(lambda: len(self._sessions))
        Gauge("agentrl_env_lost_threads", "Env calls that never returned", registry=registry).set_function(self._stuck)

    def envs(self) -> Answer:
        return Answer(200, wire.dump({"envs": [offer.form.model_dump() for offer in self.offers.values()]}))

    async def tasks(self, name: str, split: str, offset: int, limit: int) -> Answer:
        offer = self._offer(name)
        try:
            return Answer(200, wire.dump(await offer.page(split, offset, limit), nan=True))
        except AgentRLError as error:
            if isinstance(error.__cause__, CallTimeoutError):
                raise ApiError(504, str(error), kind=error_class(error), retryable=True) from error
            if split not in SPLITS and not isinstance(error, DataError):
                raise ApiError(404, f"{name} gives no tasks for this split: {error}", kind="UnknownSplit") from error
            raise as_api_error(error) from error

    async def open(self, request: OpenSession) -> Answer:
        """A new session, or the recorded answer where the idempotency key was seen in one that is still open.

        Goes on when the caller goes away: who asks again with the key finds it.
        """
        key = request.idempotency_key
        if key is None:
            return await self._awaited(asyncio.ensure_future(self._open(request)))
        if key in self._opening:
            before, answer = self._opening[key]
            if wire.dump(before.model_dump(), nan=True) != wire.dump(request.model_dump(), nan=True):
                raise ApiError(409, "this idempotency_key opened a session for another request", kind="Conflict")
            return await self._awaited(answer)
        answer = asyncio.ensure_future(self._open(request))
        self._opening[key] = (request, answer)
        answer.add_done_callback(lambda done: self._forget_failure(key, done))
        return await self._awaited(answer)

    def _forget_failure(self, key: str, done: asyncio.Task[Answer]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._opening.pop(key, None)

    async def _awaited(self, answer: asyncio.Future[Answer]) -> Answer:
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled():
                raise ApiError(404, "the session was closed", kind="UnknownSession") from None
            raise

    async def _open(self, request: OpenSession) -> Answer:
        offer = self._offer(request.env)
        self._make_room()
        session = PlayedSession(secrets.token_urlsafe(16), offer, lambda error: self._failed(offer, error))
        self._pending += 1
        try:
            reply = await session.open(request)
            body = self._opened(session, reply)
        except BaseException as error:
            self._close(session)
            if isinstance(error, AgentRLError):
                self._failed(offer, error)
                raise as_api_error(error) from error
            raise
        finally:
            self._pending -= 1
        self._sessions[session.id] = session
        if request.idempotency_key is not None:
            self._keys[session.id] = request.idempotency_key
        loop = asyncio.get_running_loop()
        session.touched = loop.time()
        loop.call_later(self.limits.lease_s, self._expire, session)
        return Answer(200, body)

    def _opened(self, session: PlayedSession, reply: dict[str, Any]) -> bytes:
        """The reply's bytes; only a drawn task may hold NaN, which comes back as the label or row it is part of."""
        task = reply.pop("task", None)
        body = wire.dump({"session_id": session.id, "lease_s": self.limits.lease_s, **reply})
        return body if task is None else body[:-1] + b',"task":' + wire.dump(task, nan=True) + b"}"

    def _failed(self, offer: Offer, error: AgentRLError) -> None:
        if isinstance(error, BusyError):  # nothing failed: who asked waits
            return
        kind = error_class(error)
        self._errors.labels(offer.name, kind).inc()
        log.warning("%s", error, exc_info=error.__cause__)

    def _make_room(self) -> None:
        taken = len(self._sessions) + self._pending + len(self._closing) + self._stuck()
        if taken >= self.limits.sessions:
            raise ApiError(
                429, f"all {self.limits.sessions} sessions are taken", kind="Full", retryable=True, retry_after_s=1
            )

    def _stuck(self) -> int:
        self._lost = [session for session in self._lost if session.env.lost]
        return len(self._lost)

    def _expire(self, session: PlayedSession) -> None:
        """The lease's timer: the session's end, or another round if it was used since."""
        if session.id not in self._sessions:
            return
        loop = asyncio.get_running_loop()
        left = session.touched + self.limits.lease_s - loop.time()
        if session.busy or left > 0:
            loop.call_later(self.limits.lease_s if session.busy else left, self._expire, session)
            return
        self._expired.inc()
        self._remove(session)

    def _remove(self, session: PlayedSession) -> asyncio.Task[None]:
        del self._sessions[session.id]
        self._opening.pop(self._keys.pop(session.id, ""), None)
        return self._close(session)

    def _close(self, session: PlayedSession) -> asyncio.Task[None]:
        """Its slot is free when the env is closed."""
        closing = asyncio.ensure_future(session.close())
        self._closing.add(closing)

        def closed(task: asyncio.Task[None]) -> None:
            self._closing.discard(task)
            if session.env.lost:
                self._lost.append(session)
            if session.env.close_error is not None:
                self._errors.labels(session.env.name, "close").inc()
                log.warning("%s", session.env.close_error)

        closing.add_done_callback(closed)
        return closing

    def begin_step(
        self, session_id: str, index: int, form: Any
    ) -> tuple[PlayedSession, Answer | asyncio.Future[Answer] | None]:
        """The session, and what its `begin` gives."""
        session = self._session(session_id)
        try:
            before = session.begin(index, form)
        except DataError as error:
            raise as_api_error(error) from error
        self._steps[session.env.name] += before is None
        return session, before

    async def step(self, session_id: str, request: StepRequest) -> Answer:
        """Goes on when the caller goes away."""
        session, before = self.begin_step(session_id, request.index, request.form)
        return await (asyncio.shield(asyncio.ensure_future(session.play())) if before is None else recorded(before))

    def heartbeat(self, session_id: str) -> Answer:
        self._session(session_id)
        return Answer(200, wire.dump({"lease_s": self.limits.lease_s}))

    async def close(self, session_id: str) -> Answer:
        """When it answers, `close` has run, or its time was up. Who has no id, as the answer to `open` never came, names the
        idempotency key: also an opening that is still under way then ends.
        """
        if session_id in self._opening:
            _, opening = self._opening[session_id]
            if not opening.done():
                opening.cancel()
                await asyncio.wait({opening})
                return Answer(200, b"{}")
            session_id = next((own for own, key in self._keys.items() if key == session_id), session_id)
        await asyncio.shield(self._remove(self._session(session_id)))
        return Answer(200, b"{}")

    def image(self, sha256: str) -> bytes:
        """PNG bytes of an image that an open session has shown."""
        for session in self._sessions.values():
            if sha256 in session.images:
                return session.images[sha256].png
        raise ApiError(404, "no open session has shown this image", kind="UnknownImage")

    async def end(self) -> None:
        """Close everything, for the server's own end."""
        for session in list(self._sessions.values()):
            self._remove(session)
        if self._closing:
            await asyncio.wait(self._closing, timeout=self.limits.call_timeout_s)

    def _offer(self, name: str) -> Offer:
        if name not in self.offers:
            raise ApiError(404, f"there is no env {name[:80]!r} here: {', '.join(self.offers)}", kind="UnknownEnv")
        return self.offers[name]

    def _session(self, session_id: str) -> PlayedSession:
        """The session a call is for, whose lease that renews."""
        if session_id not in self._sessions:
            raise ApiError(
                404, "there is no such session: closed, expired, or the server restarted", kind="UnknownSession"
            )
        session = self._sessions[session_id]
        session.touched = asyncio.get_running_loop().time()
        return session
