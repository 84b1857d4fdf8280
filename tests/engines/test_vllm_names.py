"""Names and values of vLLM's, known without importing it: what it does not take is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import ConfigError
from agentrl.config import Config
from agentrl.config.checks import check_engine
from agentrl.config.load import option_names
from agentrl.engines.vllm_names import check_vllm_names, engine_argument_names, tool_parser_names
from agentrl.engines.vllm_options import (
    OWN_ARGUMENTS,
    TUNED,
    VLLMOptions,
    engine_arguments,
    environment,
    parallel_sizes,
    parse_engine_args,
)
from agentrl.engines.vllm_values import engine_argument_takes


def check(args: list[str], **model: Any) -> None:
    check_vllm_names(Config.model_validate({"engine": {"args": args}, "model": model}))


def test_what_vllm_knows_passes() -> None:
    check(["tensor_parallel_size=2", "max-num-batched-tokens=4096", "block_size=32"], tool_parser="qwen3_xml")
    check([], tool_parser="json")
    assert len(engine_argument_names()) > 100 and len(tool_parser_names()) > 20


@pytest.mark.parametrize(
    ("args", "model", "said"),
    [
        (["tensor_paralel_size=2"], {}, "no such argument. Did you mean tensor_parallel_size"),
        (["logprobs_mode=raw_logits"], {}, "logprobs_mode: training needs"),
        ([], {"tool_parser": "hermess"}, "no such tool parser. Did you mean hermes"),
    ],
)
def test_another_name_is_refused_with_the_nearest(args: list[str], model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(args, **model)


def test_what_agentrl_sets_is_refused_with_the_flag_that_there_is() -> None:
    """Whatever is handed to vLLM is either refused or tuned; a flag that is named exists."""
    passed = {name for device in ("cpu", "gpu") for name in engine_arguments(VLLMOptions("m", device=device))}
    assert passed <= OWN_ARGUMENTS.keys() | set(TUNED) and not OWN_ARGUMENTS.keys() & set(TUNED)
    assert set(TUNED) | OWN_ARGUMENTS.keys() <= set(engine_argument_names())
    flags = {f"--{name.replace('_', '-')}" for name in option_names(Config)} | {"--model"}
    for name, why in OWN_ARGUMENTS.items():
        with pytest.raises(ConfigError, match=f"--engine.args {name}: "):
            check([f"{name.replace('_', '-')}=1"])
        assert {word.strip(",;") for word in why.split() if word.startswith("--")} <= flags, name
    check([f"{name}=1" for name in TUNED])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max_num_batched_tokens=abc", "=abc: vLLM takes a whole number."),
        ("max_num_batched_tokens=4k", "=4k: vLLM takes a whole number."),
        ("gpu-memory-utilization=1.5", "gpu_memory_utilization=1.5: vLLM takes a number above 0 and at most 1."),
        ("tensor_parallel_size=0", "takes a whole number at least 1"),
        ("enforce_eager=False", "takes true or false"),
        ("block_size=true", "takes a whole number"),
        ("scheduling_policy=fcsf", r"takes one of fcfs, priority. Did you mean fcfs\?"),
        ("max_lora_rank=7", "takes one of 1, 8, 16"),
        ("runner=generator", "takes one of auto, generate, pooling, draft"),
        ("revision=7", "takes a text .in quotes"),
        ("mm_processor_kwargs=x", "takes a table"),
    ],
)
def test_a_value_that_vllm_does_not_take_is_refused_with_what_it_takes(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check([given])


def test_values_that_vllm_takes_pass_and_what_cannot_be_seen_is_left_to_it() -> None:
    check(['compilation_config={"level" = 0}', "attention_backend=whatever", "quantization=fp8", 'revision="7"'])
    check(["gpu_memory_utilization=1", "max_lora_rank=16", "kv_cache_dtype=fp8", "cudagraph_capture_sizes=[1, 2]"])
    check(["load_format=dummy", "enable_prefix_caching=false", "mm_processor_kwargs={a = 1}", "max_logprobs=-1"])
    seen = [name for name in engine_argument_names() if engine_argument_takes(name) is not None]
    assert len(seen) > 0.8 * len(engine_argument_names())


def test_they_are_for_vllm_alone() -> None:
    config = Config.model_validate({"engine": {"name": "scripted", "args": ["block_size=32"], "script": "s.py:f"}})
    with pytest.raises(ConfigError, match=r"--engine.args is not used with --engine scripted"):
        check_engine(config, ("vllm", "scripted"))


def test_an_engine_that_is_spread_over_devices_runs_a_process_on_each() -> None:
    sizes = parallel_sizes(parse_engine_args(["tensor-parallel-size=2", "pipeline_parallel_size=3"]))
    options = VLLMOptions("m", engine_args={"block_size": 32}, **sizes)
    assert options.devices == 6
    arguments = engine_arguments(options)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 3)
    assert arguments["distributed_executor_backend"] == "mp" and arguments["block_size"] == 32
    assert environment(options)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    with pytest.raises(ConfigError, match="tensor_parallel_size=two"):
        parallel_sizes(parse_engine_args(["tensor_parallel_size=two"]))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_children_of_vllm_are_never_forked(device: Any) -> None:
    """A forked one would not import vllm_child, and outlive a parent that is killed."""
    assert environment(VLLMOptions("m", device=device))["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(("own", "level"), [(None, "WARNING"), ("INFO", "INFO")])
def test_how_much_vllm_logs_is_the_users(own: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if own is None:
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    else:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", own)
    assert environment(VLLMOptions("m"))["VLLM_LOGGING_LEVEL"] == level


def test_the_command_says_it_before_an_engine_starts(tmp_path: Path) -> None:
    program = "import sys; from agentrl.cli.main import run; code = run(sys.argv[1:]); "
    program += "loaded = {'vllm', 'ray'} & set(sys.modules); sys.exit(99 if loaded else code)"
    command = ["train", "--env", "screenshot_math", "--engine.args", "blocksize=3"]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--engine.args blocksize" in done.stderr and "block_size" in done.stderr
    assert not list(tmp_path.iterdir())
