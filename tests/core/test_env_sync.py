"""`agentrl.sync`: an async env behind gymnasium's plain interface."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import weakref
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agentrl
from agentrl import Action, Env, Task


class Counting(Env):
    """Async, with a connection that knows the thread it was made on, and a task of its own under way."""

    def __init__(self) -> None:
        self.loops: set[int] = set()
        self.closed = 0
        self.left_cancelled = False

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed, options=options)
        self.loops.add(id(asyncio.get_running_loop()))
        self.database = sqlite3.connect(":memory:")
        self.background = asyncio.create_task(self._watch())
        return "go", {}

    async def _watch(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left_cancelled = True
            raise

    async def step(self, action: Any) -> Any:
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        if action == "raise":
            raise ValueError("from inside")
        value = self.database.execute("select 1").fetchone()[0]
        return "", float(value), True, False, {}

    async def close(self) -> None:  # type: ignore[override]
        self.closed += 1


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "agentrl-sync"]


def test_every_call_runs_on_one_loop_and_close_ends_it() -> None:
    inner = Counting()
    env = agentrl.sync(inner)
    assert isinstance(env, gymnasium.Env)
    for _ in range(2):
        assert env.reset(seed=1) == ("go", {})
        assert env.step("x") == ("", 1.0, True, False, {})
    assert env.get_wrapper_attr("task") == Task("1")
    env.close()
    env.close()
    assert inner.closed == 1 and len(inner.loops) == 1 and inner.left_cancelled
    assert threads() == []
    with pytest.raises(RuntimeError, match="Counting is closed"):
        env.step("x")


def test_errors_come_out_as_they_are() -> None:
    env = agentrl.sync(Counting())
    env.reset(seed=1)
    with pytest.raises(ValueError, match="from inside"):
        env.step("raise")
    assert env.step("x")[1] == 1.0
    env.close()


async def test_it_works_under_a_running_loop() -> None:
    env = agentrl.sync(Counting())
    env.reset(seed=1)
    assert env.step("x")[1] == 1.0
    env.close()


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_takes_it() -> None:
    check_env(agentrl.sync(Counting()), skip_render_check=True)
    limited = gymnasium.wrappers.TimeLimit(agentrl.sync(Counting()), 2)
    limited.reset(seed=0)
    assert limited.step("x")[2]
    limited.close()


def test_a_sync_env_is_returned_as_it_is() -> None:
    env = Env()
    assert agentrl.sync(env) is env
    limited = gymnasium.wrappers.TimeLimit(agentrl.sync(Counting()), 2)
    assert agentrl.sync(limited) is limited
    limited.close()


def test_a_wrapper_over_an_async_env_is_refused() -> None:
    with pytest.raises(TypeError, match=r"TimeLimit\(agentrl.sync\(Counting"):
        agentrl.sync(gymnasium.wrappers.TimeLimit(Counting(), 2))


def test_a_forgotten_view_ends_its_thread() -> None:
    env = agentrl.sync(Counting())
    thread = env._thread  # type: ignore[attr-defined]
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_sync_methods_of_an_async_env_run_on_its_thread_too() -> None:
    seen = []

    class Mixed(Env):
        def reset(self, **options: Any) -> Any:
            seen.append(threading.get_ident())
            return super().reset(**options)

        async def step(self, action: Action) -> Any:
            seen.append(threading.get_ident())
            return "", None, True, False, {}

    env = agentrl.sync(Mixed())
    env.reset(seed=0)
    env.step("x")
    env.close()
    assert len(set(seen)) == 1 and seen[0] != threading.get_ident()
