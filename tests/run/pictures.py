"""An environment whose pictures do not compress: one request of it takes 48 MB."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image as PILImage

from agentrl import Env, GenerationRequest, Image, Reply, Task

SIDE = 4000


class Noise(Env):
    """One turn, worth 1 for an odd number of letters."""

    @classmethod
    def tasks(cls, split: str) -> list[Task]:
        return [Task(str(i)) for i in range(50)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed, options=options)
        noise = self.np_random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return [Image(PILImage.fromarray(noise)), "What do you see?"], {}

    def step(self, action: Any) -> Any:
        return "", float(len(str(action)) % 2), True, False, {}


def reply(request: GenerationRequest) -> Reply:
    """By the seed of the request, and slowly: its pictures stay in the object store meanwhile."""
    seed = request.sampling.seed or 0
    return Reply([65 + seed % 26] * (1 + seed % 2) + [258], [-3.0] * (2 + seed % 2), delay_s=8.0)
