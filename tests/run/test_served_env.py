"""`agentrl train --env http://…` for real: vLLM, DeepSpeed, Ray, and an env server."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrl.agent_server.env_service import EnvLimits
from agentrl.envs.screenshot_math import ScreenshotMath

from agentrl.seeds import env_seed

from ..background import serving_envs
from .test_real_train import check_nothing_is_lost, rollouts, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Seen(ScreenshotMath):
    """Remembers the tasks and seeds it was reset with, and whether it was closed."""

    resets: list[tuple[str, int | None]] = []
    open = 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        opening = super().reset(seed=seed, options=options)
        type(self).resets.append((self.task.id, seed))
        type(self).open += 1
        return opening

    def close(self) -> None:
        type(self).open -= hasattr(self, "task")
        super().close()


def test_a_served_env_is_trained_on(tmp_path: Path) -> None:
    with serving_envs({"screenshot_math": Seen}, limits=EnvLimits(sessions=64)) as url:
        options = ["--env", f"{url}/screenshot_math", "--algo", "reinforce_pp", "--train.steps", "2"]
        sizes = ["--train.batch-groups", "4", "--rollout.n-samples", "4", "--eval.tasks", "4", "--run.seed", "3"]
        records = train(tmp_path, *options, *sizes, "--train.max-staleness", "0")
        assert Seen.open == 0
    assert [record["version"] for record in records] == [0, 1, 2]
    assert all(record["mismatch/max_abs"] < 1e-4 for record in records[1:])
    assert not any(key.startswith("errors/") for record in records for key in record)
    lines = rollouts(tmp_path)
    check_nothing_is_lost(lines, 4)
    assert all((line["task_id"], env_seed(3, line["draw"])) in Seen.resets for line in lines)
    assert any(len(row["images"]) > 1 for line in lines for row in line["rows"])
