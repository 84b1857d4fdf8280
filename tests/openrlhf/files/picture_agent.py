"""An image agent of two turns, in OpenRLHF's format: its feedback shows a picture."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from PIL import Image


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turn = 0

    async def reset(self, states: dict, **kwargs: Any) -> dict:
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs: Any) -> dict[str, Any]:
        self.turn += 1
        picture = Image.new("RGB", (28, 28), (10 * self.turn, 200, 30))
        place = "<|vision_start|><|image_pad|><|vision_end|>"
        return {
            "rewards": torch.tensor([len(states["action_text"]) / 100]),
            "environment_feedback": f"\n<|im_start|>user\n{place}<|im_end|>\n<|im_start|>assistant\n",
            "environment_images": [picture],
            "done": self.turn >= 2,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
