"""`agentrl train` for real: Ray, vLLM on the CPU, DeepSpeed, weights back into the engine. One run an environment."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

AGENTRL = str(Path(sys.executable).with_name("agentrl"))
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PORTS = (6379, 8265, 10001, 29500, 52365)
"""Where Ray and its dashboard, clients and agents listen unless told otherwise, and where torch's ranks meet."""
SIZES = ["--train.steps", "3", "--train.batch-groups", "4", "--rollout.n-samples", "4", "--eval.tasks", "8"]
AT_ONCE = {
    "screenshots": ["--env", "screenshot_math", "--algo", "reinforce_pp", "--train.max-staleness", "0", *SIZES],
    "tools": [
        *("--env", "calculator_math", "--algo", "grpo", "--engine.count", "2", "--rollout.workers", "2"),
        *SIZES,
    ],
}


def begin(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """`agentrl train` in a process of its own."""
    command = [AGENTRL, "train", "--run.dir", str(folder), "--run.name", "run", *options]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def ended(folder: Path, run: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, when the run has come to its end."""
    assert run.wait(550) == 0, (folder / "log").read_text()[-5000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


def train(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run to the end; the records of metrics.jsonl."""
    run = begin(folder, *options)
    try:
        return ended(folder, run)
    finally:
        run.kill()


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[bytes]]]]:
    """Two runs that begin together, three engines between them, on a machine where every default port is taken."""
    with ExitStack() as stack:
        for port in PORTS:
            with suppress(OSError):  # somebody else has taken it
                stack.enter_context(socket.create_server(("", port)))
        folders = {name: tmp_path_factory.mktemp(name) for name in AT_ONCE}
        runs = {name: (folder, begin(folder, *AT_ONCE[name])) for name, folder in folders.items()}
        for _, run in runs.values():
            stack.callback(run.kill)
        yield runs


def rollouts(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "run" / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.open()]


def check_nothing_is_lost(lines: list[dict[str, Any]], n: int) -> None:
    """Every draw from 0 on is there with all its members, once."""
    seen = Counter((line["draw"], line["sample"]) for line in lines)
    assert set(seen.values()) == {1}
    draws = {draw for draw, _ in seen}
    assert draws == set(range(max(draws) + 1))
    assert len(seen) == len(draws) * n


def check_versions(lines: list[dict[str, Any]], staleness: int, records: Sequence[dict[str, Any]] = ()) -> None:
    """Sampled tokens carry the version that sampled them, no older than the bound at the step that trained them. A step that
    changed no weights made no version: where there may be such, `records` of all steps say what was trained.
    """
    made = {record["step"] + 1: record["version"] for record in records}
    for line in lines:
        if line["outcome"] != "trained":
            continue
        trained = made.get(line["step"], 0) if made else line["step"] - 1
        for row in line["rows"]:
            versions = [v for v, mask in zip(row["versions"], row["loss_mask"], strict=True) if mask]
            assert 0 <= trained - min(versions) <= staleness
            assert all(v == -1 for v, p in zip(row["versions"], row["logprobs"], strict=True) if p == 0.0 and v < 0)


def test_screenshots_synchronous_and_exact(at_once: dict[str, Any]) -> None:
    """At staleness 0 every trained token was sampled by the weights it is trained on: both sides agree on it."""
    folder, run = at_once["screenshots"]
    records = ended(folder, run)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["version"] for record in records] == [0, 1, 2, 3]
    assert all(record["mismatch/max_abs"] < 1e-4 for record in records[1:])
    assert {"eval/reward/mean", "eval/greedy/reward/mean"} <= set(records[0]) & set(records[-1])
    lines = rollouts(folder)
    check_nothing_is_lost(lines, 4)
    check_versions(lines, 0)
    assert any(len(row["images"]) > 1 for line in lines for row in line["rows"])
    check_export(folder / "run" / "final")


def check_export(folder: Path) -> None:
    from agentrl.torchvision_ops import ensure_torchvision_imports

    ensure_torchvision_imports()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert AutoProcessor.from_pretrained(folder).chat_template
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert all(parameter.numel() for parameter in model.parameters())


def test_tools_with_grpo_and_one_version_of_lag(at_once: dict[str, Any]) -> None:
    """Two engines and two workers: what the one and the other sampled first has the trainer's log-probabilities."""
    folder, run = at_once["tools"]
    records = ended(folder, run)
    assert records[1]["mismatch/max_abs"] < 1e-4
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert max(record["staleness/max"] for record in records[1:]) <= 1
    lines = rollouts(folder)
    check_nothing_is_lost(lines, 4)
    check_versions(lines, 1)
    assert any(message["role"] == "tool" for line in lines for message in line["messages"])


def test_what_is_trained_is_what_the_engine_sampled(tmp_path: Path) -> None:
    """The scripted engine in the whole machinery, two environments, PPO with a KL and a loss from a file: every trained row
    is spelled by the script.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "from agentrl import Reply\n"
        "def reply(request):\n"
        "    seed = request.sampling.seed\n"
        "    ids = [10 + (seed >> shift) % 200 for shift in range(0, 24, 8)]\n"
        "    return Reply([*ids, 503], [-0.5] * 4)\n"
    )
    options = [
        "--env",
        "screenshot_math",
        "calculator_math",
        "--engine",
        "scripted",
        "--engine.script",
        f"{script}:reply",
    ]
    sizes = ["--train.batch-groups", "2", "--rollout.n-samples", "2", "--train.steps", "2", "--eval.tasks", "2"]
    algorithm = ["--algo", "ppo", "--algo.kl.coef", "0.01", "--algo.trust", f"{EXAMPLES / 'custom_loss.py'}:soft"]
    records = train(tmp_path, *options, *sizes, *algorithm, "--run.seed", "5")
    assert all({"critic/loss", "kl/ref", "kl/coef"} <= record.keys() for record in records[1:])
    check_mixture(records, rollouts(tmp_path), ["screenshot_math", "calculator_math"])
    assert all((folder / "critic").is_dir() for folder in (tmp_path / "run" / "checkpoints").glob("step_*"))
    from agentrl.seeds import derive, sampling_seed

    for line in rollouts(tmp_path):
        trained = [t for row in line["rows"] for t, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m]
        seeds = [derive(sampling_seed(5, line["draw"], line["sample"]), turn) for turn in range(line["turns"])]
        spelled = [[*(10 + (seed >> shift) % 200 for shift in range(0, 24, 8)), 503] for seed in seeds]
        assert trained == [token for turn in spelled for token in turn]


def check_mixture(records: list[dict[str, Any]], lines: list[dict[str, Any]], envs: list[str]) -> None:
    """Both environments are evaluated, each step measures those it trained, and a group is of one of them."""
    for record in (records[0], records[-1]):
        assert {f"eval/env/{env}/reward/mean" for env in envs} < record.keys()
        assert record["eval/episodes"] == sum(record[f"eval/env/{env}/episodes"] for env in envs) == 2 * len(envs)
    played = {line["group_id"]: line["env"] for line in lines}
    assert set(played.values()) == set(envs)
    assert all(line["env"] == played[line["group_id"]] for line in lines)
    for record in records[1:]:
        trained = {line["env"] for line in lines if line["step"] == record["step"] and line["outcome"] == "trained"}
        assert {env for env in envs if f"env/{env}/reward/mean" in record} == trained
