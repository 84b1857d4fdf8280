"""The same run with TRL's GRPOTrainer, as its documentation has it: tools are given as functions, and its loop calls them.

    python -m end_to_end_parts.peer JOB_AS_JSON MODEL ENGINE OUT

in a process of its own: accelerate sets what DeepSpeed reads. ENGINE: transformers, batching (transformers' continuous
batching) or vllm (in the same process).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.torchvision_ops import ensure_torchvision_imports

from .ours import Job
from .tasks import TOOL_TURNS, WAITS, counted, counting, evaluate, solved, sums

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How transformers reads a reply in the chat template of agentrl's tiny policies."""
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "batching": {"use_transformers_continuous_batching": True},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512},
}


async def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: As in 17*23.
    """
    await WAITS.wait()
    return str(evaluate(expression))


def reward(name: str) -> Any:
    judge = {"counting": counted, "sums": solved}[name]

    def judged(completions: list[Any], label: list[str], **_: Any) -> list[float]:
        return [
            judge(completion[-1]["content"] if completion[-1]["role"] == "assistant" else "", want)
            for completion, want in zip(completions, label, strict=True)
        ]

    return judged


def arguments(job: Job, engine: str) -> dict[str, Any]:
    """Micro-batches of `micro_rows` padded rows; everything else as agentrl is told."""
    tools = {"max_tool_calling_iterations": TOOL_TURNS} if job.name == "sums" else {}
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": job.micro_rows,
        "gradient_accumulation_steps": job.rollouts // job.micro_rows,
        "num_generations": job.samples,
        "max_completion_length": job.all_tokens + (64 if job.name == "sums" else 0),
        "generation_kwargs": {"max_tokens" if engine == "vllm" else "max_new_tokens": job.turn_tokens},
        "shuffle_dataset": False,
        "max_steps": job.steps,
        "learning_rate": job.lr,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        **tools,
        **ENGINES[engine],
    }


def run(job: Job, model: str, engine: str) -> dict[str, Any]:
    """Times are in seconds since the epoch; `waited` = seconds of calls, `serial_excess` as in `Waits`."""
    ensure_torchvision_imports()
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.response_template = RESPONSE
    rows = {"counting": counting, "sums": sums}[job.name](job.prompts, 0)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward(job.name),
        args=GRPOConfig(**arguments(job, engine)),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        tools=[calculator] if job.name == "sums" else None,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in logged]
    return {
        "began": ends[0],
        "ended": ends[-1],
        "rewards": [entry["reward"] for entry in logged],
        "lengths": lengths,
        "tokens": sum(lengths) * job.rollouts,
        "extra": {
            "calls_per_rollout": len(WAITS.made) / job.rollouts / job.steps,
            "waited": sum(seconds for _, seconds in WAITS.made),
            "serial_excess": WAITS.serial_excess(),
        },
    }


if __name__ == "__main__":
    described, model, engine, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(Job(**json.loads(described)), model, engine)))
