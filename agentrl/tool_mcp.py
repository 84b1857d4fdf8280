"""The tools of an MCP server as tools of a `ToolEnv`, by the `mcp` package (`pip install agentrl[mcp]`).

A server that is a command is started for each episode, at its first call, and ended with it: episodes share no state.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import inspect
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, InfrastructureError
from .messages import Image, Text
from .registry import is_url, suggest
from .tool_schema import ArgumentsError

Target = str | Sequence[str]
START_S = 60.0
REFUSALS = (-32600, -32601, -32602, -32603)
"""JSON-RPC's own codes: the server itself refused the call, unlike a lost connection or time that ran out."""


class McpToolError(Exception):
    """What a tool of the server answered when it failed; the model is told."""


@dataclass(frozen=True)
class McpSchema:
    """A tool as the server describes it; the same face as `ToolSchema`."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The names are checked here, values by the server. Raises ArgumentsError."""
        known = self.parameters.get("properties")
        missing = [name for name in self.parameters.get("required", ()) if name not in arguments]
        unknown = [name for name in arguments if known is not None and name not in known]
        problems = [f"{name} is missing" for name in missing]
        if not self.parameters.get("additionalProperties", False):
            problems += [f"there is no {name}.{suggest(name, known or ())}" for name in unknown]
        if problems:
            raise ArgumentsError("; ".join(problems[:3]))
        return dict(arguments)


class McpConnection:
    """One session with the server. A task of its own opens and closes it, as the package's scopes demand."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self.timeout = timeout_s
        self._over = asyncio.Event()
        self._up: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        """The fault boundary of the connection: who waits for it is told, and later calls fail by themselves."""
        try:
            async with _client(self.target, self.timeout) as client:
                self._up.set_result(client)
                await self._over.wait()
        except BaseException as error:
            if not self._up.done():
                failure = InfrastructureError(f"MCP server {_shown(self.target)}: {_reason(error)}")
                failure.__cause__ = error
                self._up.set_exception(failure)
            if not isinstance(error, Exception):
                raise

    async def client(self) -> Any:
        """Raises InfrastructureError when the server cannot be reached."""
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._up)
        except TimeoutError as error:
            raise InfrastructureError(f"MCP server {_shown(self.target)} did not answer in {START_S:g} s") from error

    async def tools(self) -> list[McpSchema]:
        """All pages."""
        client, found, cursor = await self.client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [McpSchema(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a `@tool` method may return. Raises McpToolError, or InfrastructureError when the server is gone."""
        client = await self.client()
        from mcp import MCPError

        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code in REFUSALS and not self._task.done():
                raise McpToolError(str(error)) from error
            raise InfrastructureError(f"MCP server {_shown(self.target)}: {name}: {_reason(error)}") from error
        parts = [_part(block) for block in result.content]
        if result.is_error:
            raise McpToolError("\n".join(str(part) for part in parts if isinstance(part, str)) or "the tool failed")
        if all(isinstance(part, str) for part in parts):
            return "\n".join(parts)
        return [Text(part) if isinstance(part, str) else part for part in parts]

    async def close(self) -> None:
        self._over.set()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()


def _client(target: Target, timeout_s: float) -> Any:
    import mcp

    server: Any = target
    if not isinstance(target, str) or not is_url(target):
        words = shlex.split(target) if isinstance(target, str) else list(target)
        server = mcp.StdioServerParameters(command=words[0], args=words[1:])
    return mcp.Client(server, read_timeout_seconds=timeout_s)


def _part(block: Any) -> Any:
    """A block of a result as text or picture."""
    from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents

    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, ImageContent):
        return Image(base64.b64decode(block.data))
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return block.model_dump_json(exclude_none=True)


def _shown(target: Target) -> str:
    return target if isinstance(target, str) else " ".join(target)


def _reason(error: BaseException) -> str:
    """The innermost error of a group, which is what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


class McpTools:
    """Mixed into an env class: the connection of an episode. A `close` of your own must call `super().close()`."""

    mcp_target: Target
    mcp_timeout_s: float
    _mcp: McpConnection | None = None

    def reset(self, **options: Any) -> Any:
        left = self.__dict__.setdefault("_mcp_left", [])
        left += [self._mcp] if self._mcp is not None else []
        self._mcp = None
        return super().reset(**options)  # type: ignore[misc]

    async def _mcp_call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._mcp is None:
            self._mcp = McpConnection(self.mcp_target, self.mcp_timeout_s)
        return await self._mcp.call(name, arguments)

    async def close(self) -> None:
        current, self._mcp = self._mcp, None
        for connection in (*self.__dict__.pop("_mcp_left", ()), current):
            if connection is not None:
                await connection.close()
        outcome = super().close()  # type: ignore[misc]
        if inspect.isawaitable(outcome):
            await outcome


def mcp_methods(schemas: Sequence[McpSchema], mark: str, reserved: Callable[[str], bool]) -> dict[str, Any]:
    """Marked methods for a class body. Raises ConfigError for a name that an env needs itself."""
    taken = [schema.name for schema in schemas if reserved(schema.name)]
    if taken:
        raise ConfigError(
            f"the MCP server has a tool {taken[0]!r}, a name that an env needs itself: choose others by only=."
        )
    return {schema.name: _method(schema, mark) for schema in schemas}


def _method(schema: McpSchema, mark: str) -> Any:
    async def call(self: Any, **arguments: Any) -> Any:
        return await self._mcp_call(schema.name, arguments)

    call.__name__ = call.__qualname__ = schema.name
    call.__doc__ = schema.description
    setattr(call, mark, schema)
    return call


def list_tools(target: Target, timeout_s: float, only: Sequence[str] | None) -> list[McpSchema]:
    """The server's tools, asked for on a thread of its own. Raises ConfigError."""

    async def ask() -> list[McpSchema]:
        connection = McpConnection(target, timeout_s)
        try:
            return await connection.tools()
        finally:
            await connection.close()

    coming: concurrent.futures.Future[list[McpSchema]] = concurrent.futures.Future()

    def run() -> None:
        try:
            coming.set_result(asyncio.run(ask()))
        except BaseException as error:
            coming.set_exception(error)

    threading.Thread(target=run, name="mcp tools", daemon=True).start()
    try:
        found = coming.result(START_S + timeout_s)
    except ModuleNotFoundError as error:
        raise ConfigError("from_mcp needs the mcp package: pip install agentrl[mcp].") from error
    except (InfrastructureError, TimeoutError) as error:
        raise ConfigError(f"the tools of MCP server {_shown(target)} cannot be read: {error}") from error
    missing = [name for name in only or () if name not in {schema.name for schema in found}]
    if missing:
        raise ConfigError(f"MCP server {_shown(target)} has no tool {missing[0]!r}.")
    return [schema for schema in found if only is None or schema.name in only]
