"""The agent of `openai_sdk.py` on the Anthropic SDK; the annotation of `client` says which client it wants.

agentrl train --agent examples/agents/anthropic_sdk.py:run --env calculator_math
"""

from __future__ import annotations

import json
from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from anthropic import AsyncAnthropic

from agentrl import Task

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: Any = {"name": "calculator", "description": "Evaluate arithmetic.", "input_schema": EXPRESSION}


async def run(task: Task, client: AsyncAnthropic) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the last answer."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(4):
        reply = await client.messages.create(model="policy", max_tokens=64, messages=messages, tools=[CALCULATOR])
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            text = "".join(block.text for block in reply.content if block.type == "text")
            return {"reward": float(last_number(text) == task.label)}
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": calculate(use.input)} for use in uses]
        messages.append({"role": "user", "content": results})
    return {"reward": 0.0}


def calculate(arguments: Any) -> str:
    """The value of the expression that the model wrote, or what is wrong with it."""
    try:
        return written(evaluate(arguments["expression"]))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {json.dumps(str(error))}"


app = agent_app(run)
