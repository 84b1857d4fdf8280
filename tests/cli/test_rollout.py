"""agentrl rollout: episodes without training, in this process and without Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = """
    from agentrl import Reply

    def five(request):
        return Reply([1, 2, 3, 4, 5], logprobs=[-1.0] * 5)

    def broken(request):
        raise RuntimeError("no tokens today")
"""
REWARD = """
    def length(completion, label):
        return {"reward": float(label), "score": 1.0, "metrics": {"letters": len(completion)}}
"""
AGENT = """
    from agentrl import AgentExecutorBase

    class Twice(AgentExecutorBase):
        async def execute(self, task, ctx):
            record = ctx.begin(task)
            prompt = ctx.renderer.start([{"role": "user", "content": task.prompt}])
            node = record.add_sampled(record.add(None, "prompt", prompt.token_ids), await ctx.generate(prompt.token_ids))
            node.reward = 0.5
            record.finish_reason = "stop"
            return record
"""


def records(path: Path) -> list[dict[str, Any]]:
    return sorted(
        (json.loads(line) for line in path.read_text().split("\n")[:-1]), key=lambda r: (r["draw"], r["sample"])
    )


@pytest.fixture
def rollout(agentrl, models, tmp_path):
    """rollout("-n", 3): random tokens on the tiny policies' tokenizers unless told otherwise; (what was said, the lines)."""

    def play(*argv: Any, env: str = "screenshot_math", kind: str = "tiny-vlm", engine: str = "random"):
        out = tmp_path / "new" / "rollouts.jsonl"
        what = ["--env", env] if env else []
        said = agentrl("rollout", *what, "--engine", engine, "--model", models(kind), "--out", out, *argv)
        return said, records(out) if out.is_file() else []

    return play


def test_n_counts_draws_and_samples_count_episodes_of_each(rollout) -> None:
    said, lines = rollout("-n", 3, "--samples", 2)
    assert said.code == 0, said.err
    assert [(line["draw"], line["sample"]) for line in lines] == [(d, s) for d in range(3) for s in range(2)]
    assert len({line["task_id"] for line in lines}) == 3
    assert len({line["rollout_id"] for line in lines}) == 6 and len({line["group_id"] for line in lines}) == 3
    assert "6 episodes" in said.out and "reward/mean" in said.out


def test_lines_are_those_of_a_run_and_pictures_lie_beside_them(rollout, tmp_path) -> None:
    _, lines = rollout("-n", 2)
    for line in lines:
        assert (line["step"], line["outcome"], line["error"], line["env"]) == (0, "played", None, "screenshot_math")
        (row,) = line["rows"]
        sizes = {len(row[key]) for key in ("token_ids", "loss_mask", "logprobs", "versions", "rewards")}
        assert len(sizes) == 1 and row["advantage"] is None
        sampled = np.array(row["loss_mask"], bool)
        assert (np.array(row["logprobs"])[sampled] < 0).all()
        assert set(np.array(row["versions"])[sampled]) == {0} and set(np.array(row["versions"])[~sampled]) == {-1}
        for sha, _, _ in row["images"]:
            assert (tmp_path / "new" / "images" / f"{sha}.png").is_file()


def test_the_summary_shows_an_episode_as_text(rollout) -> None:
    said, _ = rollout("-n", 1)
    assert "[user]" in said.out and "<image 84x56" in said.out and "[assistant]" in said.out and "ended by" in said.out


def test_the_seed_decides_everything(rollout) -> None:
    first, again, other = (rollout("-n", 3, "--run.seed", seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert [line["task_id"] for line in first] != [line["task_id"] for line in other]


def test_random_tokens_do_not_depend_on_the_order_of_requests(rollout) -> None:
    together = rollout("-n", 4)[1]
    in_turn = rollout("-n", 4, "--rollout.max-episodes", 1)[1]
    assert together == in_turn


def test_another_split_is_played_in_its_order(rollout) -> None:
    _, lines = rollout("-n", 3, "--split", "test")
    assert [line["task_id"] for line in lines] == ["tiny/test/0", "tiny/test/1", "tiny/test/2"]


def test_options_reach_the_env_and_its_tasks(rollout) -> None:
    _, lines = rollout("-n", 1, "--env.opt", "level=easy", "max_turns=1")
    assert lines[0]["task_id"].startswith("easy/") and lines[0]["turns"] == 1


def test_two_environments_are_mixed_and_measured_apart(rollout) -> None:
    options = ["--env.opt", "screenshot_math:level=easy", "--env.weights", 1, 2, "--samples", 2]
    said, lines = rollout("--env", "calculator_math", "-n", 8, *options)
    played = {line["group_id"]: line["env"] for line in lines}
    assert len(lines) == 16 and set(played.values()) == {"screenshot_math", "calculator_math"}
    assert all(line["env"] == played[line["group_id"]] for line in lines)
    assert all(("easy/" in line["task_id"]) == (line["env"] == "screenshot_math") for line in lines)
    assert "env/calculator_math/reward/mean" in said.out and "env/screenshot_math/reward/mean" in said.out


def test_a_script_says_what_is_sampled(rollout, write) -> None:
    script = write("script.py", SCRIPT)
    said, lines = rollout(
        "-n", 2, "--engine.script", f"{script}:five", engine="scripted", env="calculator_math", kind="tiny-text"
    )
    assert said.code == 0, said.err
    for line in lines:
        row = line["rows"][0]
        assert [t for t, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask] == [1, 2, 3, 4, 5]


def test_a_dataset_with_a_reward_function(rollout, write) -> None:
    data = write("data.jsonl", '{"input": "a", "label": 3}\n{"input": "b", "label": 3}\n')
    reward = write("reward.py", REWARD)
    said, lines = rollout(
        "--data.path",
        data,
        "--data.label-key",
        "label",
        "--reward",
        f"{reward}:length",
        "-n",
        2,
        env="",
        kind="tiny-text",
    )
    assert said.code == 0, said.err
    assert [line["total_reward"] for line in lines] == [3.0, 3.0]
    assert all("letters" in line["metrics"] for line in lines)


def test_an_agent_of_the_users_own(rollout, write) -> None:
    agent = write("agent.py", AGENT)
    said, lines = rollout("--agent", f"{agent}:Twice", "-n", 2, env="calculator_math", kind="tiny-text")
    assert said.code == 0, said.err
    assert [line["total_reward"] for line in lines] == [0.5, 0.5]


def test_a_runs_file_can_be_given(rollout, write) -> None:
    path = write("run.toml", "[rollout]\nn_samples = 4\nmax_turns = 1\n[optim]\nlr = 0.1\n[parallel]\nranks = 2")
    said, lines = rollout("--config", path, "-n", 2)
    assert said.code == 0, said.err
    assert [line["turns"] for line in lines] == [1, 1]


def test_episodes_that_all_fail_exit_with_1_and_say_why(rollout, write) -> None:
    script = write("script.py", SCRIPT)
    said, lines = rollout("-n", 3, "--engine.script", f"{script}:broken", engine="scripted")
    assert said.code == 1
    assert "3 of 3 episodes" in said.out and "no tokens today" in said.out
    assert [line["outcome"] for line in lines] == ["failed"] * 3
    assert all("no tokens today" in line["error"]["message"] for line in lines)


def test_without_out_there_is_the_summary_alone(agentrl, models, tmp_path) -> None:
    said = agentrl("rollout", "--env", "screenshot_math", "--engine", "random", "--model", models("tiny-vlm"), "-n", 1)
    assert said.code == 0 and "1 episodes" in said.out and "written" not in said.out
    assert not list(tmp_path.glob("**/*.png"))


def test_without_a_model_the_tiny_tokenizer_is_used(agentrl, models, tmp_path, monkeypatch) -> None:
    import agentrl.trainers.tiny as tiny

    monkeypatch.setattr(tiny, "tiny_path", lambda kind: Path(models(kind)))
    for env in ("screenshot_math", "calculator_math"):
        assert agentrl("rollout", "--env", env, "--engine", "random", "-n", 1).code == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--env", "screenshot_mat"], "Did you mean screenshot_math?"),
        (["--env", "nowhere.py:Env"], "There is no file nowhere.py."),
        (["--env", "broken.py:Env"], "No module named 'no_such_module'"),
        (["--env", "screenshot_math", "--env.opt", "levl=easy"], "Did you mean level"),
        (["--env", "screenshot_math", "--env.opt", "level=huge"], "no level 'huge'"),
        (["--env", "screenshot_math", "--engine", "scripted"], "needs --engine.script"),
        (["--env", "screenshot_math", "--engine", "scripted", "--engine.script", "no.py:f"], "There is no file no.py."),
        (["--env", "screenshot_math", "--engine", "scripted", "--engine.script", "no.py"], "path/to/file.py:name"),
        (["--env", "screenshot_math", "--engine.script", "no.py:f"], "not used with --engine random"),
        (["--env", "screenshot_math", "--engine", "randm"], "Did you mean random?"),
        (["--env", "screenshot_math", "--model", "/nowhere"], "there is no such folder"),
        (["--env", "screenshot_math", "--split", "dev"], "dev"),
        (["--env", "screenshot_math", "-n", "0"], "--tasks 0"),
        (["--env", "screenshot_math", "--optim.lr", "1"], "--optim.lr"),
        (["--env", "screenshot_math", "--rollout.n-samples", "2"], "--rollout.n-samples"),
        (["--env.opt", "a=1"], "--env.opt needs --env"),
        (["--data.path", "nowhere.jsonl", "--reward", "reward.py:length"], "nowhere.jsonl"),
        ([], "--env NAME"),
    ],
)
def test_what_is_asked_wrongly_exits_with_2_before_anything_loads(agentrl, models, write, argv, said) -> None:
    write("broken.py", "import no_such_module")
    write("reward.py", REWARD)
    model = [] if "--model" in argv else ["--model", models("tiny-vlm")]
    engine = [] if "--engine" in argv else ["--engine", "random"]
    result = agentrl("rollout", *engine, *model, *argv)
    assert result.code == 2 and said in result.err


def test_a_text_model_for_an_env_with_pictures_is_refused(rollout) -> None:
    said, _ = rollout("-n", 1, kind="tiny-text")
    assert said.code == 2 and "shows images" in said.err


@pytest.mark.parametrize("out", ["folder", "file/rollouts.jsonl"])
def test_an_out_that_cannot_be_written_is_refused(rollout, tmp_path, out) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    said, _ = rollout("-n", 1, "--out", tmp_path / out)
    assert said.code == 2 and "cannot be written" in said.err


WAITING = """
    from pathlib import Path
    from agentrl import Reply

    def wait(request):
        Path("asked").touch()
        return Reply([1], delay_s=600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_130_and_loads_no_ray(models, write, tmp_path, number) -> None:
    write("script.py", WAITING)
    code = "import sys; from agentrl.cli.main import run; code = run(sys.argv[1:]); print('ray' in sys.modules); sys.exit(code)"
    argv = ["rollout", "--env", "calculator_math", "--engine", "scripted", "--engine.script", "script.py:wait"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv, "--model", models("tiny-text")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not (tmp_path / "asked").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().endswith("agentrl: Interrupted.") and out.strip() == "False"
