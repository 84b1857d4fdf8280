"""An agent on Pydantic AI, as it is.

    agentrl train --agent examples/agents/pydantic_ai_agent.py:run --env calculator_math

What the model gets wrong too often ends the framework's run with an error of its own, which is reward 0 here.
"""

from __future__ import annotations

from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from agentrl import Task

agent = Agent()


@agent.tool_plain
def calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    try:
        return written(evaluate(expression))
    except (ValueError, ArithmeticError) as error:
        raise ModelRetry(str(error)) from error


async def run(task: Task, client: AsyncOpenAI) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the last answer."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    try:
        result = await agent.run(str(task.prompt), model=model, usage_limits=UsageLimits(request_limit=4))
    except AgentRunError:
        return {"reward": 0.0}
    return {"reward": float(last_number(result.output) == task.label)}


app = agent_app(run)
