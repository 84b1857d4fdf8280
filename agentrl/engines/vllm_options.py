"""How a vLLM engine is started: plain values, importable without vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config.pairs import parse_options
from ..errors import ConfigError

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""vLLM's arguments that say over how many devices one engine is spread."""

OWN_ARGUMENTS = {
    "model": "the model is --model",
    "dtype": "the type is --model.dtype",
    "trust_remote_code": "it is --model.trust-remote-code",
    "seed": "the seed is --run.seed",
    "max_model_len": "the longest sequence is --rollout.max-len",
    "max_num_seqs": "the most sequences at once are --engine.max-seqs",
    "limit_mm_per_prompt": "an engine takes as many images as the tasks have",
    "kv_cache_memory_bytes": "it is --engine.kv-cache-gb on a CPU, --engine.args gpu_memory_utilization=… on a GPU",
    "enable_chunked_prefill": "on a CPU a seeded request dies in a chunked prefill; on a GPU it is vLLM's default",
    "enable_sleep_mode": "an engine sleeps with --engine.colocated",
    "distributed_executor_backend": "it follows from the devices of an engine",
    "disable_log_stats": "agentrl reports what its engines do",
    "use_tqdm_on_load": "agentrl shows how far the start is",
    "weight_transfer_config": "agentrl sends the weights",
    "logprobs_mode": "training needs the log-probabilities of the tempered distribution",
    "generation_config": "sampling is the run's, never the checkpoint's",
    "override_generation_config": "sampling is the run's, never the checkpoint's",
}
"""Arguments of vLLM's that are not passed on, and why."""

TUNED = (
    *PARALLEL,
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "mm_processor_cache_gb",
)
"""Arguments that have a value here, and may be given another: they decide on speed and memory alone."""


@dataclass(frozen=True)
class VLLMOptions:
    """One engine. `model` is a folder in Hugging Face format.

    `device` cpu | gpu decides threads, memory and defaults; `dtype` auto = float32 on the CPU, bfloat16 on a GPU.
    `kv` says what becomes of running requests at a weight update: "keep" their KV cache, or "recompute" it (exact).
    `stop_token_ids` are all the ids that end a turn: the checkpoint's own are never added. `kv_cache_gb` is GiB, for the
    CPU. `tool_parser` is one of vLLM's, or "json": Hermes' blocks read with json alone. `update_timeout_s` bounds a weight
    update, which comes by `transport`, `silence_timeout_s` the time without a token while answers are awaited; `sleeps` = it
    shares its device with the trainer, in turn. `engine_args` go to vLLM's AsyncEngineArgs last; of those set here only TUNED
    are taken.
    """

    model: str
    device: Literal["cpu", "gpu"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    seed: int = 0
    kv: Literal["keep", "recompute"] = "keep"
    tool_parser: str = "hermes"
    stop_token_ids: tuple[int, ...] = ()
    max_images: int = 0
    kv_cache_gb: float = 0.5
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    threads: int = 1
    enforce_eager: bool = True
    sleeps: bool = False
    trust_remote_code: bool = False
    start_timeout_s: float = 600.0
    update_timeout_s: float = 300.0
    transport: Literal["shm", "nccl", "ipc"] = "shm"
    silence_timeout_s: float = 300.0
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def resolved_dtype(self) -> str:
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def devices(self) -> int:
        """Devices, and worker processes, of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


def environment(options: VLLMOptions) -> dict[str, str]:
    """The variables the engine's own process tree needs; set for that process and nowhere else. How much vLLM logs is the
    user's VLLM_LOGGING_LEVEL, and WARNING without it.
    """
    common = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # A forked child would not begin with vllm_child.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if options.device == "gpu":
        return common
    threads = str(options.threads)
    return common | {
        # One process for engine core and worker instead of two; threads are bounded by OMP_NUM_THREADS, not by binding.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.devices == 1 else "1",
        # Two small helpers of vLLM's sampler are compiled with C++ at the first request (16 s) unless this is off.
        "TORCH_COMPILE_DISABLE": "1" if options.enforce_eager else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def engine_arguments(options: VLLMOptions) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    On the CPU no chunked prefill, and room for a whole sequence in a step: a seeded request dies in a chunked prefill.
    """
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.resolved_dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enable_prefix_caching": True,
        "enforce_eager": options.enforce_eager,
        **{name: getattr(options, name) for name in PARALLEL},
        "distributed_executor_backend": "uni" if options.devices == 1 else "mp",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "limit_mm_per_prompt": {"image": options.max_images, "video": 0},
        "mm_processor_cache_gb": 0,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "trust_remote_code": options.trust_remote_code,
        "enable_sleep_mode": options.sleeps,
    }
    if options.device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gb * 2**30)
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(options.max_model_len, 8192)
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments | options.engine_args


def parse_engine_args(pairs: Iterable[str]) -> dict[str, Any]:
    """The KEY=VALUE pairs of --engine.args; `-` in keys as `_`. Raises ConfigError."""
    return {key.replace("-", "_"): value for key, value in parse_options(pairs, "--engine.args").items()}


def parallel_sizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of PARALLEL that are given. Raises ConfigError for what is no number of devices."""
    sizes = {name: arguments[name] for name in PARALLEL if name in arguments}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"--engine.args {name}={size}: it is a number of devices.")
    return sizes
