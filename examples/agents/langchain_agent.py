"""An agent on LangChain's chat model, as it is: streamed replies, tools bound to the model, LangChain's messages.

agentrl train --agent examples/agents/langchain_agent.py:run --env calculator_math
"""

from __future__ import annotations

from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

from agentrl import Task


@tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    return written(evaluate(expression))


async def run(task: Task, client: AsyncOpenAI) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the last answer."""
    chat = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key, streaming=True)
    model = chat.bind_tools([calculator])
    messages: list[Any] = [HumanMessage(str(task.prompt))]
    for _ in range(4):
        reply = await model.ainvoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return {"reward": float(last_number(str(reply.text)) == task.label)}
        for call in reply.tool_calls:
            messages.append(ToolMessage(await used(call["args"]), tool_call_id=call["id"]))
    return {"reward": 0.0}


async def used(arguments: dict[str, Any]) -> str:
    """The tool's answer, or what is wrong with the call."""
    try:
        return str(await calculator.ainvoke(arguments))
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


app = agent_app(run)
