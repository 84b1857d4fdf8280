"""One env, one thread: who is blamed, what a blocked call costs, and when close runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from agentrl import Env, EnvError, InfrastructureError
from agentrl.env_calls import CallRaisedError, CallTimeoutError, run_async
from agentrl.env_session import EnvSession

LONG = 5.0


class Calls(list[Any]):
    """What was called, and a way to wait for it from another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def append(self, call: Any) -> None:
        with self._changed:
            super().append(call)
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: name in names(self), LONG)

    async def hold(self, name: str) -> None:
        await asyncio.to_thread(self.wait, name)


class Recorder(Env):
    """Notes what was called, and on which thread; `at` maps a method to what it does first."""

    def __init__(self, at: dict[str, Callable[[], Any]] | None = None, calls: Calls | None = None) -> None:
        self.at = at or {}
        self.calls = calls if calls is not None else Calls()
        self._note("constructor")

    def _note(self, what: str) -> Any:
        self.calls.append((what, threading.get_ident()))
        return self.at[what]() if what in self.at else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._note("reset") or ("hi", {"seed": seed, "options": options})

    def step(self, action: Any) -> Any:
        return self._note("step") or ("ok", 1.0, True, False, {})

    def close(self) -> None:
        self._note("close")


def raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def session_of(calls: Calls, timeout_s: float = LONG, **at: Callable[[], Any]) -> EnvSession:
    return EnvSession(lambda: Recorder(at, calls), timeout_s, "Recorder")


def names(calls: Calls) -> list[str]:
    return [call if isinstance(call, str) else call[0] for call in calls]


async def test_everything_runs_on_one_thread_that_ends() -> None:
    calls = Calls()
    async with session_of(calls) as env:
        assert await env.reset(7, {"a": 1}) == ("hi", {"seed": 7, "options": {"a": 1}})
        assert await env.step("x") == ("ok", 1.0, True, False, {})
        assert await env.attribute("max_turns", None) == 16
        assert await env.attribute("nothing", 3) == 3
        thread = env._thread._thread  # type: ignore[union-attr]
    assert names(calls) == ["constructor", "reset", "step", "close"]
    assert {ident for _, ident in calls} == {calls[0][1]} != {threading.get_ident()}
    thread.join(LONG)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        StopIteration(),
        TimeoutError("the socket"),
        ConnectionError("lost"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        RecursionError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_an_env_raises_is_an_env_error_with_its_cause(where: str, error: BaseException) -> None:
    calls = Calls()
    session = session_of(calls, **{where: raises(error)})
    with pytest.raises(EnvError, match=rf"Recorder: {where} raised .*{type(error).__name__}") as caught:
        async with session as env:
            await env.reset(0, {})
            await env.step("x")
    assert caught.value.__cause__ is error
    assert not session.abandoned, "it came back"
    assert names(calls).count("close") == (where != "constructor")


async def test_errors_of_our_classes_keep_their_class() -> None:
    with pytest.raises(InfrastructureError, match="sandbox lost"):
        async with session_of(Calls(), step=raises(InfrastructureError("sandbox lost"))) as env:
            await env.step("x")


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_of_our_classes_keeps_its_context_and_no_other(is_async: bool) -> None:
    def lost(*args: Any) -> None:
        try:
            {}["the sandbox"]
        except KeyError:
            raise InfrastructureError("sandbox lost")  # noqa: B904

    async def lost_later(*args: Any) -> None:
        lost()

    with pytest.raises(InfrastructureError) as caught:
        async with session_of(Calls(), step=lost_later if is_async else lost) as env:
            await env.step("x")
    shown = "".join(traceback.format_exception(caught.value))
    assert "KeyError: 'the sandbox'" in shown and "CallRaisedError" not in shown


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_error_that_cannot_be_printed_is_an_env_error() -> None:
    with pytest.raises(EnvError, match="Unprintable"):
        async with session_of(Calls(), step=raises(Unprintable())) as env:
            await env.step("x")


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), StopIteration(), InfrastructureError("x")])
async def test_an_error_in_close_is_kept_and_not_raised(error: BaseException) -> None:
    session = session_of(Calls(), close=raises(error))
    async with session as env:
        await env.step("x")
    assert session.close_error is not None


@pytest.mark.parametrize("made", [None, "text", object()])
async def test_a_factory_that_makes_no_env(made: Any) -> None:
    with pytest.raises(EnvError, match="is no environment"):
        async with EnvSession(lambda: made, LONG):
            pass


@pytest.mark.parametrize("result", [None, "hi", ("hi",), ("hi", None), ("hi", {}, 1), [], object(), ["x"] * 100_000])
async def test_a_reset_of_another_shape(result: Any) -> None:
    with pytest.raises(EnvError, match="reset must return") as caught:
        async with session_of(Calls(), reset=lambda: result or (1,)) as env:
            await env.reset(0, {})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("result", ["hi", ("hi", 1.0, True, {}), ("hi", 1.0, True, False, None), ("", 0, 0, 0, 0, {})])
async def test_a_step_of_another_shape(result: Any) -> None:
    with pytest.raises(EnvError, match="step must return"):
        async with session_of(Calls(), step=lambda: result) as env:
            await env.step("x")


# ---------------------------------------------------------------------- time


async def test_a_blocked_step_fails_in_time_and_close_runs_behind_it() -> None:
    calls = Calls()
    gate = threading.Event()
    session = session_of(calls, 0.05, step=lambda: gate.wait(LONG) and None)
    with pytest.raises(EnvError, match=r"step took longer than 0\.05 s"):
        async with session as env:
            await env.step("x")
    assert session.abandoned
    assert "close" not in names(calls)
    gate.set()
    await calls.hold("close")
    assert names(calls).count("close") == 1
    assert calls[-1][1] == calls[0][1], "on the env's own thread"


async def test_a_blocked_constructor_is_closed_once_it_is_done() -> None:
    calls = Calls()
    gate = threading.Event()
    session = session_of(calls, 0.05, constructor=lambda: gate.wait(LONG))
    with pytest.raises(EnvError, match="constructor took longer"):
        async with session:
            pass
    gate.set()
    await calls.hold("close")
    assert names(calls) == ["constructor", "close"]


async def test_a_close_that_never_returns_is_given_up() -> None:
    gate = threading.Event()
    session = session_of(Calls(), 0.05, close=lambda: gate.wait(LONG))
    async with session as env:
        await env.step("x")
    assert session.abandoned
    assert "close took longer" in str(session.close_error)
    gate.set()


async def test_cancelling_closes_behind_the_running_call_and_passes() -> None:
    calls = Calls()
    gate = threading.Event()

    async def play() -> None:
        async with session_of(calls, step=lambda: gate.wait(LONG) and None) as env:
            await env.step("x")

    task = asyncio.ensure_future(play())
    await calls.hold("step")
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done(), "it waits for close, which waits for the step"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(calls) == ["constructor", "step", "close"]


async def test_cancelling_twice_leaves_close_queued() -> None:
    calls = Calls()
    gate = threading.Event()

    async def play() -> None:
        async with session_of(calls, step=lambda: gate.wait(LONG) and None) as env:
            await env.step("x")

    task = asyncio.ensure_future(play())
    await calls.hold("step")
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await calls.hold("close")


async def test_cancelling_in_the_constructor_closes_what_was_made() -> None:
    calls = Calls()
    gate = threading.Event()
    session = session_of(calls, constructor=lambda: gate.wait(LONG))
    task = asyncio.ensure_future(session.__aenter__())
    await calls.hold("constructor")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await calls.hold("close")
    assert names(calls) == ["constructor", "close"]


def test_a_loop_that_is_gone_does_not_keep_close_from_running() -> None:
    calls = Calls()
    gate = threading.Event()

    async def play() -> None:
        async with session_of(calls, 0.02, step=lambda: gate.wait(LONG) and None) as env:
            await env.step("x")

    with pytest.raises(EnvError):
        asyncio.run(play())
    gate.set()
    calls.wait("close")


# ---------------------------------------------------------------------- async envs


class AsyncEnv(Env):
    """`at` as in Recorder, awaited."""

    def __init__(self, at: dict[str, Any] | None = None, calls: Calls | None = None) -> None:
        self.at = at or {}
        self.calls = calls if calls is not None else Calls()

    async def _note(self, what: str) -> Any:
        self.calls.append(what)
        if what in self.at:
            return await self.at[what]()

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        await self._note("reset")
        return "hi", {}

    async def step(self, action: Any) -> Any:
        await self._note("step")
        return "ok", 1.0, True, False, {}

    async def close(self) -> None:  # type: ignore[override]
        await self._note("close")


async def _cancelled() -> None:
    raise asyncio.CancelledError


async def _timed_out() -> None:
    raise TimeoutError("own")


async def _forever() -> None:
    await asyncio.Event().wait()


async def test_async_envs_run_on_the_loop() -> None:
    calls = Calls()
    async with EnvSession(lambda: AsyncEnv(None, calls), LONG) as env:
        await env.reset(0, {})
        assert (await env.step("x"))[1] == 1.0
    assert calls == ["reset", "step", "close"]


@pytest.mark.parametrize(
    ("does", "said", "abandoned"),
    [
        (_cancelled, "raised .*Cancelled", False),
        (_timed_out, "raised TimeoutError: own", False),
        (_forever, "longer than", False),
    ],
)
async def test_an_async_step_that_fails_is_closed(does: Any, said: str, abandoned: bool) -> None:
    calls = Calls()
    session = EnvSession(lambda: AsyncEnv({"step": does}, calls), 0.05 if does is _forever else LONG)
    with pytest.raises(EnvError, match=said):
        async with session as env:
            await env.step("x")
    assert calls == ["step", "close"]
    assert session.abandoned == abandoned


async def test_cancelling_an_async_step_passes_and_closes() -> None:
    calls = Calls()

    async def play() -> None:
        async with EnvSession(lambda: AsyncEnv({"step": _forever}, calls), LONG) as env:
            await env.step("x")

    task = asyncio.ensure_future(play())
    await calls.hold("step")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == ["step", "close"]


class HalfAsync(Recorder):
    """Sync but for `close`, and a sync `step` that returns something to await."""

    def step(self, action: Any) -> Any:
        return self._later()

    async def _later(self) -> Any:
        self._note("step")
        return "ok", 1.0, True, False, {}

    async def close(self) -> None:  # type: ignore[override]
        self._note("close")


async def test_what_is_to_be_awaited_is_awaited_wherever_it_comes_from() -> None:
    calls = Calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with EnvSession(lambda: HalfAsync(calls=calls), LONG) as env:
            assert (await env.step("x"))[0] == "ok"
        gc.collect()
    assert names(calls) == ["constructor", "step", "close"]


async def test_an_async_close_runs_also_where_nobody_waits() -> None:
    calls = Calls()
    gate = threading.Event()
    with pytest.raises(EnvError, match="constructor took longer"):
        async with EnvSession(lambda: HalfAsync({"constructor": lambda: gate.wait(LONG)}, calls), 0.05):
            pass
    gate.set()
    await calls.hold("close")


class Duck:
    """No gymnasium, no close."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return "hi", {}

    def step(self, action: Any) -> Any:
        return "ok", 1.0, True, False, {}


async def test_an_env_needs_reset_and_step_and_nothing_else() -> None:
    session = EnvSession(Duck, LONG)
    async with session as env:
        await env.reset(0, {})
        assert await env.attribute("max_turns", 5) == 5
    assert session.close_error is None


async def test_wrapped_envs_are_read_through_their_wrappers() -> None:
    async with EnvSession(lambda: gymnasium.Wrapper(gymnasium.Wrapper(Recorder())), LONG) as env:
        assert await env.attribute("tools", None) == []
        assert (await env.reset(3, {}))[1]["seed"] == 3


async def test_an_attribute_that_raises_is_the_envs_fault() -> None:
    class Raises(Recorder):
        @property
        def secret(self) -> int:
            raise ValueError("boom")

    with pytest.raises(EnvError, match="secret raised ValueError"):
        async with EnvSession(Raises, LONG) as env:
            await env.attribute("secret", 0)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(3), GeneratorExit("no"), BaseException("odd")])
async def test_what_async_code_raises_does_not_end_the_event_loop(raised: BaseException) -> None:
    async def step() -> None:
        raise raised

    if isinstance(raised, GeneratorExit):
        with pytest.raises(GeneratorExit):
            await run_async(step, 5.0)
        return
    with pytest.raises(CallRaisedError) as caught:
        await run_async(step, 5.0)
    assert caught.value.__cause__ is raised


async def test_async_code_may_wait_catch_and_bound_itself() -> None:
    """What runs before a step's first wait and what runs after it are one piece of code in one task."""
    log: list[str] = []

    async def busy() -> str:
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            log.append("own time")
        broken = asyncio.get_running_loop().create_future()
        broken.set_exception(ValueError("awaited"))
        try:
            await broken
        except ValueError as error:
            log.append(str(error))
        assert asyncio.current_task() is task
        return await asyncio.sleep(0, "value")

    async def endless() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(10)
        finally:
            log.append("cleaned up")

    assert await run_async(busy, 5.0) == "value"
    with pytest.raises(CallTimeoutError):
        await run_async(endless, 0.05)
    assert log == ["own time", "awaited", "cleaned up"]
