"""Tiny random policies on disk, and trainers for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tied` and `untied` (Qwen3) and `vision` (Qwen2.5-VL)."""
    from ..engines import tiny

    folder = tmp_path_factory.mktemp("models")
    tiny.text_model(folder / "tied", tied=True)
    tiny.text_model(folder / "untied", tied=False)
    tiny.vision_model(folder / "vision")
    return folder


@pytest.fixture
def make_trainer(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """make_trainer(policy="tied", planned=100, **sections): a PolicyTrainer at lr 0.1 with sgd unless told otherwise.

    They share the process group of the test process and are not closed.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def make(policy: str = "tied", planned: int = 100, **sections: dict[str, Any]) -> Any:
        from agentrl.trainers.policy_trainer import PolicyTrainer

        sections["optim"] = {"name": "sgd", "max_norm": 0.0, "lr": 0.1} | sections.get("optim", {})
        sections["train"] = {"max_staleness": 0} | sections.get("train", {})
        config = Config.model_validate(sections)
        return PolicyTrainer(config, str(models / policy), str(tmp_path / "images"), planned, 1e-3)

    return make
