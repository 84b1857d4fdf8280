"""Real vLLM engines, started once a module, and the Hugging Face models they are compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.vllm_actor import RayEngine, start_engine
from agentrl.engines.vllm_options import VLLMOptions


@pytest.fixture(scope="module")
def launch(ray_cluster: None) -> Iterator[Callable[..., RayEngine]]:
    """Start an engine on a folder; every engine is closed with the module."""
    started: list[RayEngine] = []

    def start(folder: Path, **options: Any) -> RayEngine:
        defaults = {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_gb": 0.25, "start_timeout_s": 240.0}
        engine = asyncio.run(start_engine(VLLMOptions(model=str(folder), **{**defaults, **options})))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        asyncio.run(engine.close())
