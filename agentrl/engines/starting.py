"""What a run's engine is started with, and an engine in this very process, for a command that needs no more than one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ..preflight import Ready
from ..registry import lookup
from .transport import transport_of
from .vllm_options import VLLMOptions, environment, parallel_sizes, parse_engine_args


def engine_kind(name: str) -> Any:
    """The class whose objects are made with (options, version) and have `start` and `shutdown` beside what an Engine has."""
    from .vllm_actor import VLLMActor

    return VLLMActor if name == "vllm" else lookup("engine", name)


def vllm_options(ready: Ready, gpus: float) -> VLLMOptions:
    """Where there are so many GPUs. An engine of another package is made with the same options."""
    config, engine = ready.config, ready.config.engine
    arguments = parse_engine_args(engine.args)
    options = VLLMOptions(
        model=ready.model_path,
        device="gpu" if gpus > 0 and engine.gpus != 0 else "cpu",
        dtype=config.model.dtype,
        max_model_len=ready.limits.max_len,
        max_num_seqs=engine.max_seqs,
        seed=config.run.seed % 2**31,
        kv=config.rollout.kv,
        tool_parser=config.model.tool_parser,
        stop_token_ids=ready.stop_ids,
        max_images=ready.max_images,
        kv_cache_gb=engine.kv_cache_gb,
        trust_remote_code=config.model.trust_remote_code,
        update_timeout_s=engine.update_timeout_s,
        transport=transport_of(config, gpus),
        silence_timeout_s=engine.silence_timeout_s,
        sleeps=engine.colocated,
        engine_args=arguments,
    )
    return replace(options, **parallel_sizes(arguments))


async def start_in_process(ready: Ready, gpus: float) -> Any:
    """An engine in this process, once it answers; its `shutdown` ends what vLLM started. No request passes through another
    process on its way to vLLM, whose variables are this process's from now on.

    While the model loads, the event loop stands still. Raises EngineError.
    """
    options = vllm_options(ready, gpus)
    os.environ.update(environment(options))
    engine = engine_kind(ready.config.engine.name)(options, 0)
    await engine.start()
    return engine
