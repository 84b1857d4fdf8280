"""Agent servers for a real run: `frameworks:app` has the examples side by side, `mortal` dies in the middle of an episode.

uvicorn --app-dir tests/run agent_servers:frameworks
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, get_type_hints

from agentrl.agent_server import agent_app
from anthropic import AsyncAnthropic
from fastapi import FastAPI

from agentrl import Task
from agentrl.registry import load_object

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
FRAMEWORKS = (
    "openai_sdk",
    "anthropic_sdk",
    "openai_agents",
    "pydantic_ai_agent",
    "langchain_agent",
    "smolagents_agent",
)
PLAYED = 2
_played: list[str] = []


def marked(name: str) -> Any:
    """The example's function, which is given the client that it names; a metric tells whose episode it was."""
    run = load_object(f"{EXAMPLES}/{name}.py:run")

    async def told(task: Task, client: Any) -> dict[str, Any]:
        return {**await run(task, client), "metrics": {name: 1}}

    told.__annotations__["client"] = get_type_hints(run).get("client", Any)
    return told


async def die(task: Task, client: AsyncAnthropic) -> dict[str, Any]:
    """The Anthropic example, PLAYED times; then the process is killed in the middle of an episode."""
    if len(_played) >= PLAYED:
        await client.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "last words"}])
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = await marked("anthropic_sdk")(task, client)
    _played.append(task.id)
    return outcome


frameworks = FastAPI()
for _name in FRAMEWORKS:
    frameworks.mount(f"/{_name}", agent_app(marked(_name)))
mortal = agent_app(die)
