"""agentrl eval: pass@k against what was played; and, marked slow, rollout and eval on vLLM."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = """
    from agentrl import Reply

    def say(request):
        seed = request.sampling.seed
        greedy = request.sampling.temperature == 0
        return Reply([50 if greedy or seed % 3 else 60, 2])
"""
ENV = """
    from agentrl import Env, Task

    class Luck(Env):
        max_turns = 1

        @classmethod
        def tasks(cls, split="train"):
            return [Task(f"{split}-{i}", "?") for i in range(5)]

        def step(self, action):
            right = float(action.token_ids[0] == 60)
            return "", 2 * right, True, False, {"score": right}

    class Fails(Luck):
        def step(self, action):
            raise ValueError("nonsense")
"""


@pytest.fixture
def evaluate(agentrl, models, write, tmp_path):
    """evaluate("-k", 2): the env Luck under a script; (what was said, the report, the trajectories)."""
    script, env = write("script.py", SCRIPT), write("luck.py", ENV)

    def measure(*argv, name: str = "Luck"):
        out, rollouts = tmp_path / "eval.json", tmp_path / "rollouts.jsonl"
        said = agentrl(
            *("eval", "--env", f"{env}:{name}", "--model", models("tiny-text"), "--engine", "scripted"),
            *("--engine.script", f"{script}:say", "--out", out, "--rollouts", rollouts, *argv),
        )
        report = json.loads(out.read_text()) if out.is_file() else {}
        lines = rollouts.read_text().split("\n")[:-1] if rollouts.is_file() else []
        return said, report, [json.loads(line) for line in lines]

    return measure


def test_pass_at_k_is_that_of_the_episodes_played(evaluate) -> None:
    said, report, lines = evaluate("-k", 1, 2, 4, "--eval.n", 6, "--eval.no-greedy")
    assert said.code == 0, said.err
    assert len(lines) == 5 * 6 and (report["n"], report["k"], report["tasks"], report["split"]) == (
        6,
        [1, 2, 4],
        5,
        "test",
    )
    right: dict[str, int] = defaultdict(int)
    for line in lines:
        right[line["task_id"]] += line["score"] == 1
    for k in (1, 2, 4):
        expected = sum(1 - math.comb(6 - c, k) / math.comb(6, k) for c in right.values()) / 5
        assert report["metrics"][f"pass@{k}"] == pytest.approx(expected)
    assert 0 < report["metrics"]["pass@1"] < report["metrics"]["pass@4"]
    assert report["metrics"]["reward/mean"] == pytest.approx(2 * report["metrics"]["score/mean"])
    assert "pass@4" in said.out and "5 tasks x 6 episodes" in said.out


def test_n_is_the_largest_k_unless_given(evaluate) -> None:
    _, report, lines = evaluate("-k", 3, "--eval.tasks", 2)
    assert report["n"] == 3 and report["tasks"] == 2
    assert len(lines) == 2 * 3 + 2
    assert report["metrics"]["greedy/pass@1"] == 0.0


def test_the_same_command_gives_the_same_numbers(evaluate) -> None:
    assert evaluate("-k", 2)[1] == evaluate("-k", 2)[1]


def test_a_split_of_ones_own(evaluate) -> None:
    _, report, lines = evaluate("--split", "train", "--eval.no-greedy")
    assert report["split"] == "train" and {line["task_id"] for line in lines} == {f"train-{i}" for i in range(5)}


def test_a_dataset_is_measured_as_it_is(agentrl, models, write, tmp_path) -> None:
    script = write("script.py", SCRIPT)
    data = write("data.jsonl", '{"input": "a"}\n{"input": "b"}\n')
    reward = write("reward.py", "def one(completion): return 1.0")
    said = agentrl(
        *("eval", "--data.path", data, "--reward", f"{reward}:one", "--model", models("tiny-text")),
        *("--engine", "scripted", "--engine.script", f"{script}:say", "--out", tmp_path / "eval.json"),
    )
    assert said.code == 0, said.err
    report = json.loads((tmp_path / "eval.json").read_text())
    assert (report["tasks"], report["data"], report["metrics"]["pass@1"]) == (2, data, 1.0)


@pytest.mark.parametrize("command", [("eval",), ("rollout", "-n", "1")])
def test_rows_that_are_left_out_are_named(
    agentrl, models, write, caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    caplog.set_level(logging.ERROR)
    caplog.handler.setLevel(logging.NOTSET)
    data = write("data.jsonl", '{"input": "a"}\n{"input": 3}\n{"input": "' + "long " * 99 + '"}\n')
    reward = write("reward.py", "def one(completion): return 1.0")
    said = agentrl(
        *(*command, "--engine", "random", "--data.path", data, "--data.on-error", "skip", "--rollout.max-len", 64),
        *("--reward", f"{reward}:one", "--model", models("tiny-text")),
    )
    assert said.code == 0, said.err
    assert "1 of 3 rows skipped: row 1" in caplog.text
    assert "1 of 2 rows are longer than 63 tokens and are left out: row 2" in caplog.text


def test_episodes_that_all_fail_exit_with_1(evaluate) -> None:
    said, report, _ = evaluate(name="Fails")
    assert said.code == 1 and "nonsense" in said.out
    assert report["metrics"]["excluded"] == 5.0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-k", "0"], "at least 1"),
        (["-k"], "at least 1"),
        (["-k", "8", "--eval.n", "4"], "pass@8 needs --eval.n of at least 8"),
        (["--out", "no/such/eval.json"], "there is no folder no/such"),
        (["--rollout.temperature", "0.5"], "--rollout.temperature"),
        (["--eval.every", "3"], "--eval.every"),
    ],
)
def test_what_is_asked_wrongly_exits_with_2(evaluate, argv, said) -> None:
    result, _, lines = evaluate(*argv)
    assert result.code == 2 and said in result.err and not lines


def test_a_split_without_tasks_is_refused(agentrl, models, write) -> None:
    env = write("empty.py", ENV.replace("range(5)", "range(5 if split == 'train' else 0)"))
    said = agentrl("eval", "--env", f"{env}:Luck", "--engine", "random", "--model", models("tiny-text"))
    assert said.code == 2 and "no tasks for --eval.split test" in said.err


@pytest.mark.slow
def test_rollout_and_eval_on_vllm(models, tmp_path: Path) -> None:
    from agentrl.cli.playing import open_player, ready_to_play, run_until_signal
    from agentrl.cli.rollout import RolloutCommand, make_orders, play_all
    from agentrl.evaluation import Evaluator
    from agentrl.rollout.episode import EpisodeResult

    command = RolloutCommand.model_validate(
        {
            "tasks": 3,
            "samples": 2,
            "env": {"name": "screenshot_math"},
            "model": {"path": models("tiny-vlm")},
            "rollout": {"max_new_tokens": 6},
            "engine": {"kv_cache_gb": 0.25},
        }
    )
    config = command.settings(eval={"tasks": 4, "n": 2})
    results: list[EpisodeResult] = []
    metrics: dict[str, float] = {}

    async def both() -> None:
        async with open_player(ready, tmp_path / "images", gpus) as player:
            await play_all(player, make_orders(command, ready), None, results.append)
            metrics.update(await Evaluator(config, player, ready.held_out, ready.limits, ks=[1, 2]).run())

    with ExitStack() as session:
        ready, gpus = ready_to_play(config, session)
        run_until_signal(both())
    assert len(results) == 6 and all(result.error is None for result in results)
    assert all(sha for result in results for row in result.rows for sha, _, _ in row.images)
    assert {"eval/pass@1", "eval/pass@2", "eval/greedy/pass@1"} <= set(metrics)
    # An untrained policy may sample an image placeholder: such an episode has no verdict.
    assert metrics["eval/episodes"] + metrics["eval/excluded"] == 8.0
