"""An agent on the OpenAI Agents SDK, as it is: the SDK's own loop, tools and message history.

    agentrl train --agent examples/agents/openai_agents.py:run --env calculator_math

What the model gets wrong ends the SDK's run with an error of its own, which is reward 0 here.
"""

from __future__ import annotations

from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from agentrl import Task


@function_tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    return written(evaluate(expression))


async def run(task: Task, client: AsyncOpenAI) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the last answer."""
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="calculator", model=model, tools=[calculator])
    try:
        result = await Runner.run(agent, str(task.prompt), max_turns=4, run_config=RunConfig(tracing_disabled=True))
    except AgentsException:
        return {"reward": 0.0}
    return {"reward": float(last_number(str(result.final_output)) == task.label)}


app = agent_app(run)
