"""`RemoteEnv` against a real env server: what is played over it is what is played here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from agentrl.agent_server.env_service import EnvLimits
from agentrl.envs.calculator_math import CalculatorMath
from agentrl.envs.remote import RemoteEnv, served, split_url
from agentrl.envs.screenshot_math import ScreenshotMath
from agentrl.trainers.tiny import make_tiny

import agentrl
from agentrl import (
    Action,
    ConfigError,
    Env,
    EnvError,
    GenerationRequest,
    InfrastructureError,
    Limits,
    Renderer,
    Reply,
    ScriptedEngine,
    Task,
    ToolEnv,
    run_episode,
    tool,
)
from agentrl.assemble import load_processor
from agentrl.env_check import check
from agentrl.registry import resolve_env

from ..background import serving_envs


class Guess(Env):
    """Guess a number that the seed draws."""

    max_turns = 4
    open = 0

    @classmethod
    def tasks(cls, split: str = "train") -> Any:
        if split == "stream":
            return (Task(f"s{i}", f"guess {i}") for i in range(120))
        return [Task(f"{split}{i}", f"guess {i}", {"n": i}) for i in range(130)] if split == "train" else ()

    def __init__(self) -> None:
        type(self).open += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        self.number = int(self.np_random.integers(10))
        return f"{self.task.prompt}: {self.number}", {"metrics": {"nan": float("nan"), "seen": 1}}

    def step(self, action: Any) -> Any:
        if "raise" in action:
            raise ValueError("broken on purpose")
        right = str(self.number) in action
        return f"not {action}", None if "?" in action else float(right), right, False, {"score": float(right)}

    def close(self) -> None:
        type(self).open -= 1


class Adder(ToolEnv):
    """Tools over the wire."""

    max_turns = 3

    @classmethod
    def tasks(cls, split: str = "train") -> list[Task]:
        return [Task("t", "add 2 and 3", 5)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, answer: Action) -> float:
        return float(str(self.task.label) in answer)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    envs = {"guess": Guess, "adder": Adder, "screenshot_math": ScreenshotMath, "calculator_math": CalculatorMath}
    with serving_envs(envs) as address:
        yield address


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    """A renderer of each untrained tiny policy."""
    root = tmp_path_factory.mktemp("models")
    kinds = ("tiny-text", "tiny-vlm")
    return {kind: Renderer(load_processor(str(make_tiny(kind, root / kind, max_steps=0)), False)) for kind in kinds}


def test_addresses() -> None:
    assert split_url("http://h:1/name") == ("http://h:1", "name")
    assert split_url("https://h/a/b/name/") == ("https://h/a/b", "name")
    assert split_url("http://h:1/") == ("http://h:1", None)
    for wrong in ("h:1/name", "ftp://h/x", "http://", "http://user:secret@h/x"):
        with pytest.raises(ConfigError) as raised:
            split_url(wrong)
        assert "secret" not in str(raised.value)


def test_the_tasks_are_the_servers(url: str) -> None:
    cls = resolve_env(f"{url}/guess")
    assert (cls.__name__, cls.__doc__, cls.max_turns) == ("guess", "Guess a number that the seed draws.", 4)
    tasks = cls.tasks("train")
    assert list(tasks) == list(Guess.tasks("train"))
    assert (tasks[-1], tasks[60:62], len(tasks)) == (Task("train129", "guess 129", {"n": 129}), tasks[60:62], 130)
    assert [task.id for task in cls.tasks("stream")] == [f"s{i}" for i in range(120)]
    assert not cls.tasks("test")
    mine, here = cls.tasks("train"), Guess.tasks("train")
    assert [mine[i] for i in (129, 3, 77)] == [here[i] for i in (129, 3, 77)]
    pictures = served(f"{url}/screenshot_math").tasks("test")
    assert pictures[0] == ScreenshotMath.tasks("test")[0]


def test_addresses_that_lead_nowhere(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.remote_tasks.WAIT_FOR_SERVER_S", 0.0)
    with pytest.raises(ConfigError, match="guess, adder"):
        served(f"{url}/none")
    with pytest.raises(ConfigError, match="offers guess"):
        served(url)
    with pytest.raises(ConfigError, match="no env server answers"):
        served("http://127.0.0.1:9/guess")
    with pytest.raises(ConfigError, match="token-file"):
        served(f"{url}/guess", str(tmp_path / "none"))


def test_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("sesame\n")
    with serving_envs({"guess": Guess}, token="sesame") as url:
        with pytest.raises(ConfigError, match=r"--env\.token-file"):
            served(f"{url}/guess")
        env = agentrl.sync(served(url, str(file))())
        assert env.reset(seed=0, options={"task": Task("t", "p")})[0].startswith("p: ")
        env.close()


async def play(env: Any, task: Task | None, renderer: Any, script: Any, seed: int = 3) -> Any:
    return await run_episode(env, ScriptedEngine(script), renderer, task, limits=Limits(max_turns=4), seed=seed)


def record(trajectory: Any) -> Any:
    assert trajectory.error is None, trajectory.error
    rows = [
        (row.token_ids.tolist(), row.loss_mask.tolist(), row.rewards.tolist(), row.images) for row in trajectory.rows()
    ]
    scores = (trajectory.total_reward, trajectory.score, trajectory.metrics, trajectory.truncated)
    return trajectory.task, rows, trajectory.messages, scores, trajectory.finish_reason


@pytest.mark.parametrize("name", ["guess", "adder", "screenshot_math", "calculator_math"])
@pytest.mark.parametrize("transport", ["stream", "http"])
async def test_episodes_are_those_of_the_local_env(
    url: str, name: str, transport: str, renderers: dict[str, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "http":
        monkeypatch.setattr("agentrl.envs.env_client.EnvClient._connected", _nothing)
    local = {"guess": Guess, "adder": Adder, "screenshot_math": ScreenshotMath, "calculator_math": CalculatorMath}[name]
    remote = await asyncio.to_thread(served, f"{url}/{name}")
    renderer = renderers["tiny-vlm" if name == "screenshot_math" else "tiny-text"]
    tokenizer = renderer.tokenizer

    def script(request: GenerationRequest) -> Reply:
        text = f"{sum(request.token_ids) % 10}?"
        if name in ("adder", "calculator_math") and len(request.token_ids) % 2:
            text = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        return Reply(tokenizer.encode(text, add_special_tokens=False))

    for i in range(3):
        task = next(iter(local.tasks("train"))) if i else None
        here, there = [await play(env, task, renderer, script, seed=i) for env in (local, remote)]
        assert record(here) == record(there)
    assert Guess.open == 0


async def _nothing(client: Any) -> None:
    return None


async def test_who_is_to_blame(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = await asyncio.to_thread(RemoteEnv, f"{url}/guess")
    await env.reset(seed=1)
    with pytest.raises(EnvError, match="broken on purpose"):
        await env.step(Action("raise"))
    await env.reset(seed=1)
    await env._client.call("close", env._session)  # type: ignore[union-attr]
    with pytest.raises(InfrastructureError, match="no such session"):
        await env.step(Action("1"))
    await env.close()
    with pytest.raises(EnvError, match="before reset"):
        await env.step(Action("1"))


async def test_a_full_server_is_waited_for() -> None:
    with serving_envs({"guess": Guess}, limits=EnvLimits(sessions=1)) as url:
        first, second = [await asyncio.to_thread(RemoteEnv, f"{url}/guess") for _ in range(2)]
        await first.reset(seed=0)
        waiting = asyncio.ensure_future(second.reset(seed=0))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await first.close()
        await waiting
        await second.close()
        impatient = await asyncio.to_thread(RemoteEnv, f"{url}/guess", patience_s=0.0)
        await first.reset(seed=0)
        with pytest.raises(InfrastructureError, match="429"):
            await impatient.reset(seed=0)
        await impatient.close()
        await first.close()


async def test_heartbeats_outlast_the_lease() -> None:
    with serving_envs({"guess": Guess}, limits=EnvLimits(lease_s=0.3)) as url:
        env = await asyncio.to_thread(RemoteEnv, url)
        await env.reset(seed=0)
        await asyncio.sleep(1.0)
        assert (await env.step(Action("?")))[0] == "not ?"
        await env.close()


async def test_a_server_that_starts_again_has_lost_its_sessions() -> None:
    with serving_envs({"guess": Guess}) as url:
        env = await asyncio.to_thread(RemoteEnv, url)
        first = await env.reset(seed=5)
    with serving_envs({"guess": Guess}, port=int(url.rpartition(":")[2])):
        with pytest.raises(InfrastructureError, match="no such session"):
            await env.step(Action("?"))
        assert (await env.reset(seed=5))[0] == first[0]
        await env.close()


def test_as_a_gymnasium_env(url: str) -> None:
    cls = served(f"{url}/guess")
    env: gymnasium.Env[Any, Any] = agentrl.sync(cls())
    one = env.reset(seed=4)
    assert env.reset(seed=4) == one == (one[0], {"metrics": {"seen": 1}})
    assert env.unwrapped.task.id.startswith("train")  # type: ignore[attr-defined]
    env.close()
    assert [finding.message for finding in check(cls, cls.tasks(), (0, 1)) if finding.level == "error"] == []
