"""An agent on the OpenAI SDK: it answers arithmetic, with a calculator if it likes. Nothing in it knows of training.

    agentrl train --agent examples/agents/openai_sdk.py:run --env calculator_math

`--env` brings the tasks. The same function in a process of its own, here or on another machine:

    uvicorn --app-dir examples/agents openai_sdk:app --port 9000
    agentrl train --agent http://127.0.0.1:9000 --env calculator_math
"""

from __future__ import annotations

import json
from typing import Any

from agentrl.agent_server import agent_app
from agentrl.envs.calculator_math import last_number
from agentrl.envs.safe_arithmetic import evaluate, written
from openai import AsyncOpenAI

from agentrl import Task

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: Any = {
    "type": "function",
    "function": {"name": "calculator", "description": "Evaluate arithmetic.", "parameters": EXPRESSION},
}


async def run(task: Task, client: AsyncOpenAI) -> dict[str, Any]:
    """Reward 1 for the right number at the end of the last answer."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(4):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return {"reward": float(last_number(message.content or "") == task.label)}
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)}
            for call in message.tool_calls
        ]
    return {"reward": 0.0}


def calculate(arguments: str) -> str:
    """The value of the expression that the model wrote, or what is wrong with it."""
    try:
        return written(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


app = agent_app(run)
