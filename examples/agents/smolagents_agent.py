"""An agent on smolagents, as it is. It is synchronous, so every episode has a thread of its own.

    agentrl train --agent examples/agents/smolagents_agent.py:run --env calculator_math

Its own system prompt of ten thousand characters would not fit a tiny model, so it has a short one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from openai import AsyncOpenAI
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from agentrl import Task

THREADS = ThreadPoolExecutor(256, "agent")  # asyncio's own pool has a handful


@tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: what to evaluate
    """
    return written(evaluate(expression))


async def run(task: Task, client: AsyncOpenAI) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the answer."""
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    agent = ToolCallingAgent([calculator], model, max_steps=3, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "Call final_answer with the result."
    answer = await asyncio.get_running_loop().run_in_executor(THREADS, agent.run, str(task.prompt))
    return {"reward": float(last_number(str(answer)) == task.label)}


app = agent_app(run)
