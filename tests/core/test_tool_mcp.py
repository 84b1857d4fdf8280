"""`ToolEnv.from_mcp` with a real MCP server in a process of its own, over stdio and over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import Action, ConfigError, Image, InfrastructureError, Task, ToolCall, ToolEnv, sync, tool
from agentrl.tool_mcp import McpSchema
from agentrl.tool_schema import ArgumentsError

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
NAMES = ["add", "remember", "fail", "look", "leave"]


class Local(ToolEnv):
    """One tool of its own, the rest from a server."""

    @tool
    def shout(self, text: str) -> str:
        """Say it louder."""
        return text.upper()

    def reward(self, answer: Action) -> float:
        return float(str(self.task.label) in answer)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < give_up, "the MCP server did not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module", params=["stdio", "http"])
def mixed(request: pytest.FixtureRequest, url: str) -> type[ToolEnv]:
    return Local.from_mcp(url if request.param == "http" else COMMAND)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_{name}", name, arguments, "")


def contents(result: Any) -> list[Any]:
    return [message["content"] for message in result[0]]


def test_the_servers_tools_join_the_envs_own(mixed: type[ToolEnv]) -> None:
    names = [entry["function"]["name"] for entry in mixed.tools]
    assert sorted(names) == sorted(["shout", *NAMES])
    add = next(entry["function"] for entry in mixed.tools if entry["function"]["name"] == "add")
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    assert add["parameters"]["required"] == ["a"]
    assert (mixed.__name__, mixed.__doc__) == ("Local", Local.__doc__)


async def test_an_episode(mixed: type[ToolEnv]) -> None:
    env: Any = mixed()
    env.reset(seed=0, options={"task": Task("t", "go", 5)})
    calls = [call("add", a=2, b=3), call("shout", text="hey"), call("add", a=2)]
    assert contents(await env.step(Action("", tool_calls=calls))) == ["5", "HEY", "3"]
    bad = [call("add", b=1), call("add", a=1, c=2), call("add", a="x"), call("fail", why="on purpose"), call("nothing")]
    missing, unknown, wrong, failed, none = contents(await env.step(Action("", tool_calls=bad)))
    assert missing == "Error: wrong arguments for add: a is missing"
    assert "there is no c" in unknown
    assert "Error" in wrong and "integer" in wrong
    assert "on purpose" in failed
    assert "there is no tool 'nothing'" in none
    assert env.metrics["tool_calls"] == 8 and env.metrics["tool_errors/arguments"] == 2
    (picture,) = contents(await env.step(Action("", tool_calls=[call("look")])))
    assert isinstance(picture[0], Image) and picture[0].size == (3, 2)
    _, reward, terminated, _, _ = await env.step(Action("it is 5"))
    assert (reward, terminated) == (1.0, True)
    await env.close()


async def test_a_command_is_started_an_episode() -> None:
    env: Any = Local.from_mcp(COMMAND, only=["remember", "leave"])()
    assert [entry["function"]["name"] for entry in env.tools] == ["shout", "remember", "leave"]
    for _ in range(2):
        env.reset(seed=0, options={"task": Task("t", "go")})
        for said in ("one", "one two"):
            step = await env.step(Action("", tool_calls=[call("remember", text=said.split()[-1])]))
            assert contents(step) == [said]
    with pytest.raises(InfrastructureError, match="MCP server"):
        await env.step(Action("", tool_calls=[call("leave")]))
    await env.close()


def test_behind_the_sync_view_and_under_a_subclass() -> None:
    class Mine(Local.from_mcp(" ".join(COMMAND), only=["add"])):  # type: ignore[misc]
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed, options=options)
            return "what is 2 + 2?", {}

    env = sync(Mine())
    assert env.reset(seed=0)[0] == "what is 2 + 2?"
    assert contents(env.step(Action("", tool_calls=[call("add", a=2, b=2)]))) == ["4"]
    env.close()


async def test_a_server_of_somebody_elses() -> None:
    """`mcp-server-time` of the package index."""
    beside = Path(sys.executable).parent
    program = shutil.which("mcp-server-time", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("mcp-server-time is not installed")
    env: Any = Local.from_mcp([program, "--local-timezone", "Europe/Paris"])()
    assert {"shout", "convert_time"} < {entry["function"]["name"] for entry in env.tools}
    env.reset(seed=0, options={"task": Task("t", "go")})
    tokyo = {"source_timezone": "Europe/Paris", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    calls = [call("convert_time", **tokyo), call("convert_time", **{**tokyo, "target_timezone": "Nowhere"})]
    converted, refused = contents(await env.step(Action("", tool_calls=calls)))
    assert json.loads(converted)["target"]["timezone"] == "Asia/Tokyo" and "Error" in refused and "Nowhere" in refused
    await env.close()


def test_servers_that_cannot_be_used(tmp_path: Path) -> None:
    class Adding(Local):
        def add(self) -> None: ...

    with pytest.raises(ConfigError, match="no tool 'nothing'"):
        Local.from_mcp(COMMAND, only=["nothing"])
    with pytest.raises(ConfigError, match="a tool 'add'"):
        Adding.from_mcp(COMMAND)
    with pytest.raises(ConfigError, match="cannot be read"):
        Local.from_mcp(str(tmp_path / "no_such_program"))
    with pytest.raises(ConfigError, match="cannot be read"):
        Local.from_mcp("http://127.0.0.1:9/mcp", timeout_s=5)


def test_a_tool_that_names_no_parameters_takes_any() -> None:
    assert McpSchema("query", "", {"type": "object"}).validate({"text": "x"}) == {"text": "x"}
    for parameters in ({"type": "object", "properties": {}}, {"properties": {"name": {}}}):
        with pytest.raises(ArgumentsError, match="there is no text"):
            McpSchema("query", "", parameters).validate({"text": "x"})
