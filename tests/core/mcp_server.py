"""A real MCP server: `mcp_server.py` speaks over stdio, `mcp_server.py PORT` over HTTP."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("things")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def remember(text: str) -> str:
    """Keep a note for as long as this server runs."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def fail(why: str) -> str:
    """Never works."""
    raise ToolError(why)


@server.tool()
def look() -> Image:
    """Show a picture."""
    import io

    from PIL import Image as PILImage

    buffer = io.BytesIO()
    PILImage.new("RGB", (3, 2), "red").save(buffer, format="PNG")
    return Image(data=buffer.getvalue(), format="png")


@server.tool()
def leave() -> str:
    """End the server."""
    import os

    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
