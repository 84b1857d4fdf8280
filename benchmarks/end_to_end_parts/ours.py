"""The run of agentrl, as a user starts it, and the model that both trainers start from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .meter import Meter
from .tasks import counting, demonstrations

ROOT = Path(__file__).resolve().parent.parent.parent
TASKS = Path(__file__).with_name("tasks.py")
TEMPLATE = ROOT / "trainers" / "tiny" / "chat_template.jinja"


@dataclass(frozen=True)
class Job:
    """What is compared. `groups` prompts a step with `samples` rollouts each; token limits of a turn and of all turns."""

    name: str
    groups: int
    samples: int = 4
    steps: int = 3
    lr: float = 1e-5
    turn_tokens: int = 256
    all_tokens: int = 256
    micro_rows: int = 8

    @property
    def rollouts(self) -> int:
        return self.groups * self.samples

    @property
    def prompts(self) -> int:
        return self.groups * self.steps


@dataclass
class Found:
    """What a run took, without its start. Seconds; `tokens` were sampled; one value a step in `rewards` and `lengths`."""

    began: float
    ended: float
    tokens: float
    rewards: list[float]
    lengths: list[float]
    start_s: float
    extra: dict[str, float] = field(default_factory=dict)


def program(command: str, options: Mapping[str, Any], *switches: str) -> list[str]:
    flags = [str(part) for option in options.items() for part in option]
    return [str(Path(sys.executable).with_name("agentrl")), command, *switches, *flags]


def prepare(model: str, folder: Path, *, updates: int = 6) -> str:
    """The model after a few updates on demonstrations of both tasks, with a chat template that shows tools. `folder` keeps it."""
    if not (folder / "final" / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shown = folder / "shown.jsonl"
        shown.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(updates * 16)))
        options = {
            "--model": model,
            "--model.chat-template": TEMPLATE,
            "--data.path": shown,
            "--data.tools-key": "tools",
            "--train.batch": 16,
            "--train.max-len": 1024,
            "--train.micro-batch-tokens": 2048,
            "--optim.lr": 2e-4,
            "--run.dir": folder.parent,
            "--run.name": folder.name,
        }
        Meter().run(program("sft", options, "--eval.no-enable"))
    return str(folder / "final")


def train(job: Job, model: str, folder: Path, meter: Meter, options: Mapping[str, Any]) -> Found:
    """`options` are added, as in {"--train.max-staleness": 0}. The run begins when the first episode may."""
    from time import time

    given = time()
    shared = {
        "--algo": "grpo",
        "--model": model,
        "--rollout.sampler": "in_order",
        "--rollout.n-samples": job.samples,
        "--rollout.max-new-tokens": job.turn_tokens,
        "--rollout.max-total-tokens": job.all_tokens,
        "--rollout.max-len": job.all_tokens + 256,
        "--train.batch-groups": job.groups,
        "--train.steps": job.steps,
        "--train.micro-batch-tokens": 2048,
        "--optim.lr": job.lr,
        "--run.dir": folder,
        "--run.name": "run",
    }
    meter.run(program("train", {**shared, **_task(job, folder), **options}, "--eval.no-enable"))
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert len(records) == job.steps
    assert records[-1]["version"] == job.steps, "a step changed no weights"
    played = [record["reward/count"] for record in records]
    began = records[0]["time"] - records[0]["time/step"]
    return Found(
        began=began,
        ended=records[-1]["time"],
        tokens=sum(count * record["length/action"] for count, record in zip(played, records, strict=True)),
        rewards=[record["reward/mean"] for record in records],
        lengths=[record["length/action"] for record in records],
        start_s=began - given,
        extra={"staleness_max": max(record["staleness/max"] for record in records), "turns": records[-1]["turns"]},
    )


def _task(job: Job, folder: Path) -> dict[str, Any]:
    if job.name == "sums":
        return {"--env": f"{TASKS}:Sums", "--env.opt": f"prompts={job.prompts}"}
    rows = counting(job.prompts, 0)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "--data.path": folder / "prompts.jsonl",
        "--data.input-key": "prompt",
        "--data.label-key": "label",
        "--reward": f"{TASKS}:counted",
    }
