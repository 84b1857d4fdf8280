"""A text agent of several turns, in OpenRLHF's format: right after one hint at the latest, or not at all."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.step_idx = 0
        self.max_steps = 2

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs: Any) -> dict[str, Any]:
        self.step_idx += 1
        right = str(states["label"]) in states["action_text"]
        done = right or self.step_idx >= self.max_steps
        reward = torch.tensor(float(right))
        feedback = "" if done else "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"turns_taken": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
