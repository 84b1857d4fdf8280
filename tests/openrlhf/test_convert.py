"""Command lines of OpenRLHF: the table, the converter and the list of options agree; what is printed runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import ConfigError
from agentrl.cli.train import algorithm_facts
from agentrl.config import Config
from agentrl.config.checks import check_training
from agentrl.config.load import option_names
from agentrl.openrlhf.command_line import parse
from agentrl.openrlhf.convert import RUNS, convert
from agentrl.openrlhf.older import RENAMED, newer
from agentrl.openrlhf.options import CHOICES, RL, options, options_of, table

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "from-openrlhf.md"
NAMED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d.jsonl", "--reward.remote_url", "reward.py"]


def test_the_options_are_all_of_theirs() -> None:
    listed: dict[str, list[str]] = {}
    for line in (HERE / "option_names.txt").read_text().split("\n"):
        if line.startswith("["):
            names = listed.setdefault(line.strip("[]"), [])
        elif line:
            names.append(line)
    assert listed == {program: sorted(o.name for o in known) for program, known in options().items()}
    assert DOCUMENT.read_text().endswith(table()), "docs/from-openrlhf.md has the table"


def test_every_name_of_ours_in_the_table_is_an_option_of_that_command() -> None:
    """What has a dot is an option of ours, or one of theirs in the same program."""
    for program, (_, kind, _) in RUNS.items():
        known, theirs = set(option_names(kind)), options_of(program)
        for option in theirs.values():
            dotted = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", option.ours)
            assert set(dotted) <= known | theirs.keys(), option


def test_every_option_that_has_one_here_names_it() -> None:
    """The first word of what an option is here is one of our options, and the converter sets it."""
    known = set(option_names(Config))
    flags = {"flag": [], "int": ["2"], "float": ["0.25"], "str": ["x"], "floats": ["0.5", "2"], "strs": ["a", "b"]}
    for option in options()[RL]:
        named = [word.strip(",:;") for word in option.ours.split() if word.strip(",:;") in known]
        assert option.reason is not None or named, option
        line = parse([*NAMED, f"--{option.name}", *(CHOICES.get(option.name, ())[-1:] or flags[option.kind])])
        assert line.program == RL and line.ranks is None
        assert (option.name in line.given and line.values[option.name] != option.default) or option.kind == "int"


ONE_GPU = "--actor.num_gpus_per_node 1"
LINES: list[tuple[str, dict[str, Any]]] = [
    ("", {"algo.name": "gae", "critic.lr": 9e-6, "algo.kl.coef": 0.01, "train.updates_per_batch": 8}),
    ("--data.apply_chat_template --data.prompt_dataset d.jsonl,e.jsonl --data.prompt_probs 1,2", {"model.chat_template": "auto", "data.probs": [1.0, 2.0]}),
    ("--data.max_images_per_prompt 2", {"data.image_key": "images"}),
    ("--actor.eps_clip_low_high 0.2 0.27", {"algo.clip": [0.2, 0.27]}),
    ("--actor.optim muon --actor.adam.lr 2e-5", {"optim.name": "muon", "parallel.zero_stage": 0, "optim.lr": 2e-5}),
    ("--train.async_enable --train.async_queue_size 3 --train.partial_rollout_enable", {"train.max_staleness": 3}),
    ("--rollout.vllm_generate_batch_size 1536 --train.async_enable", {"rollout.oversample": 1.5, "rollout.order": "first_done"}),
    ("--algo.advantage.estimator group_norm --algo.advantage.no_std_norm", {"algo.advantage": "dr_grpo"}),
    ("--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis", {"algo.correction": "seq_mask_tis"}),
    ("--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.target 0.1", {"algo.kl.where": "loss", "algo.kl.target": 0.1}),
    ("--algo.kl.init_coef 0 --ref.offload", {"algo.kl.coef": 0.0}),
    ("--algo.dynamic_filtering_enable", {"algo.filter.enable": True, "algo.filter.range": [0.0, 1.0]}),
    ("--reward.overlong_buffer_len 64 --reward.stop_properly_penalty_coef 0.5", {"algo.overlong.buffer": 64, "algo.stop_properly": 0.5}),
    ("--algo.advantage.lambd 0.95 --train.partial_rollout_enable --ckpt.load_enable", {"algo.lam": 1.0, "rollout.partial": None, "run.resume": None, "rollout.max_turns": 1}),
    ("--algo.advantage.gamma 0.9", {"algo.gamma": 0.9, "algo.aggregation": "token_mean"}),
    ("--algo.advantage.estimator group_norm --algo.advantage.gamma 0.99", {"algo.gamma": 1.0, "algo.aggregation": "token_mean"}),
    ("--algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 2", {"algo.aggregation": "token_mean"}),
    ("--algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 2 --actor.policy_loss_type gspo", {"algo.aggregation": "sequence_mean"}),
    ("--critic.freezing_steps 2 --train.num_episodes 3", {"critic.warmup_steps": 2, "train.passes": 3}),
    ("--train.enable_ema", {"optim.ema": 0.992}),
    ("--ds.lora.rank 8 --ds.lora.target_modules q_proj v_proj", {"lora.rank": 8, "lora.alpha": 16, "lora.targets": ["q_proj", "v_proj"]}),
    ("--eval.dataset e.jsonl --eval.steps 5 --ckpt.best_metric_key eval_gsm8k_pass4", {"eval.n": 4, "ckpt.best_by": "eval/pass@4", "data.test_path": ["e.jsonl"]}),
    ("--eval.dataset e.jsonl --eval.steps 5 --ckpt.best_metric_key eval_pass2", {"eval.n": 4, "ckpt.best_by": None}),
    ("--logger.wandb.key SECRET --logger.wandb.org us --logger.tensorboard_dir tb", {"log.wandb": True, "log.wandb_entity": "us", "log.tensorboard": True}),
    ("--vllm.tensor_parallel_size 2 --vllm.enforce_eager", {"engine.gpus": 2.0}),
    ("--actor.policy_loss_type gspo --actor.lr_scheduler constant", {"algo.level": "sequence", "optim.schedule": "constant"}),
    ("--reward.model_name_or_path rm --critic.freezing_steps 1", {"reward.name": ["reward.py", "rm"], "critic.path": "rm", "reward.normalize": False}),
    ("--reward.model_name_or_path rm --reward.normalize_enable --critic.freezing_steps 1", {"reward.normalize": True}),
    (f"--train.colocate_all {ONE_GPU}", {"engine.colocated": True, "ref.offload": True}),
    (f"--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --algo.kl.init_coef 0 {ONE_GPU}", {"engine.colocated": True, "ref.offload": False}),
    (f"--vllm.enable_sleep {ONE_GPU}", {"engine.colocated": False}),
    ("--train.colocate_all --vllm.num_engines 2", {"engine.colocated": False}),
    ("--train.agent_func_path agent.py", {"agent.name": ["agent.py"], "reward.name": [], "rollout.max_turns": 2048}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_command_line_is_a_configuration_that_the_checks_take(line: str, expected: dict[str, Any]) -> None:
    extra = [] if "estimator" in line or "freezing" in line or not line else ["--algo.advantage.estimator", "reinforce"]
    samples = ["--rollout.n_samples_per_prompt", "2"] if "group_norm" in line or "filtering" in line else []
    found = convert(["python3", "-m", "openrlhf.cli.train_ppo_ray", *NAMED, *extra, *samples, *line.split()])
    config = Config.model_validate(found.nested())
    check_training(config, algorithm_facts(config))
    for name, value in expected.items():
        section, _, key = name.rpartition(".")
        place: Any = config
        for part in section.split("."):
            place = getattr(place, part)
        got = getattr(place, key)
        assert (list(got) if isinstance(got, tuple) else got) == value, name
    assert "SECRET" not in str(found.values) + str(found.notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--n_samples_per_prompt 4", r"--n_samples_per_prompt is --rollout.n_samples_per_prompt"),
        ("--actor.model_name m", r"Did you mean actor.model_name_or_path"),
        (
            "--rewards.n_samples_per_prompt 4",
            r"Did you mean rollout.n_samples_per_prompt or eval.n_samples_per_prompt\?",
        ),
        ("--algo.advantage.estimator foo", "estimator: invalid choice: 'foo' .*gae.*reinforce.*rloo.*group_norm"),
        ("--algo.advantage.is_correction_type x", "invalid choice: 'x' .*seq-mask-tis"),
        (
            "--pretrain m --prompt_data d --zero_stage 2",
            "older OpenRLHF; in its version 0.11 --pretrain is --actor.model_name_or_path, --prompt_data is --data.prompt_dataset, --zero_stage is --ds.zero_stage",
        ),
        (
            "--vllm_num_engines=1 --wandb_org=x",
            "--vllm_num_engines is --vllm.num_engines, --wandb_org is --logger.wandb.org",
        ),
        ("--rollout.top_p 0.9", "samples from the whole distribution"),
        ("--ds.param_dtype fp16", "no float16 training"),
        ("--actor.lr_scheduler polynomial", "it is one of cosine_with_min_lr, cosine, linear"),
        ("--train.batch_size 100", "is 1024, which does not divide into updates of train.batch_size 100"),
        ("--data.max_len many", "invalid int value"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert([*NAMED, *line.split()])


PLAIN = ["--algo.kl.init_coef", "0", *NAMED]


@pytest.mark.parametrize(
    "before",
    [
        "python3 -m openrlhf.cli.train_ppo_ray",
        "ray job submit --address=http://127.0.0.1:8265 --no-wait --runtime-env-json={} -- python3 -m openrlhf.cli.train_ppo_ray",
        "ray job submit -- python3 -u openrlhf/cli/train_ppo_ray.py",
        "deepspeed --module openrlhf.cli.train_ppo_ray --",
        "train_ppo_ray --logger.wandb.run_name train_ppo_ray",
        "train_ppo_ray --logger.wandb.run_name train_sft",
        "--train.agent_func_path serve_rm.py --logger.wandb.run_name train_sft",
    ],
)
def test_what_stands_before_the_program_is_left_out(before: str) -> None:
    found = convert([*before.split(), *PLAIN]).values
    assert found["algo.kl.coef"] == 0 and found["model.path"] == "m"
    assert found["data.path"] == convert(PLAIN).values["data.path"] == ["d.jsonl"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -m openrlhf.cli.train_kto --x", "train_kto has no counterpart here"),
        ("python -m openrlhf.cli.batch_inference --x", "batch_inference is agentrl rollout here"),
        ("train_kd --x", "train_kd has no counterpart here"),
    ],
)
def test_another_program_is_named_with_its_counterpart(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(line.split())


@pytest.mark.parametrize(
    "words",
    [
        ["python3 -m openrlhf.cli.train_ppo_ray --logger.wandb.key SECRET"],
        ["python3 openrlhf/cli/train_ppo_ray.py --logger.wandb.key SECRET"],
        ["bash", "-c", "python3 -m openrlhf.cli.train_ppo_ray --logger.wandb.key SECRET"],
        ["--actor.model_name_or_path m --logger.wandb.key SECRET"],
        ["--logger.wandb.kez=SECRET"],
        ["--logger.wandb.key", "abc", "SECRET"],
        ["SECRET"],
        ["--use_wandb=SECRET"],
    ],
)
def test_no_message_shows_what_may_be_a_key(words: list[str], agentrl: Callable[..., Any]) -> None:
    said = agentrl("from-openrlhf", "--", *words)
    assert said.code == 2 and "SECRET" not in said.out + said.err
    assert any(" " in word for word in words) == ("leave out the quotes" in said.err)


def test_older_names_lead_to_present_ones() -> None:
    known = options_of(RL).keys()
    assert set(RENAMED.values()) <= known and not RENAMED.keys() & known
    assert newer("eval_temperature", known) == "eval.temperature" and newer("nonsense", known) is None
    assert newer("lora_rank", known) == "ds.lora.rank" and newer("optim", known) is None


def test_what_does_nothing_there_or_differs_here_is_said() -> None:
    line = (
        "--algo.advantage.estimator rloo --algo.advantage.gamma 0.9 --algo.advantage.lambd 0.9 --ckpt.load_enable "
        "--train.partial_rollout_enable --train.agent_func_path a.py --reward.overlong_buffer_len 9"
    )
    said = {note.partition(":")[0] for note in convert([*NAMED, *line.split()]).notes}
    assert said == {
        "algo.advantage.gamma",
        "algo.advantage.lambd",
        "train.partial_rollout_enable",
        "ckpt.load_enable",
        "reward.overlong_buffer_len",
    }


def test_what_is_not_given_is_said(agentrl: Callable[..., Any]) -> None:
    said = agentrl("from-openrlhf", "--", "--train.seed", "3")
    assert said.code == 0 and "# actor.model_name_or_path is not given" in said.out
    assert "# data.prompt_dataset is not given" in said.out and "# who gives rewards is not said" in said.out
    nothing = agentrl("from-openrlhf", "--")
    assert nothing.code == 2 and "usage: agentrl from-openrlhf" in nothing.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--vllm.num_engines 4", "here are 4 engines, 8 ranks, a critic. The run wants 12 GPUs: 4 for engines, 8 for the"),
        (f"{ONE_GPU} --algo.advantage.estimator rloo --vllm.tensor_parallel_size 2", "here are engines on 2 GPUs each. The run wants 3"),
        (f"{ONE_GPU} --algo.advantage.estimator rloo --train.async_enable", "here are train.max_staleness 1. The run wants 2"),
        (f"{ONE_GPU} --algo.advantage.estimator rloo", "ref.offload keeps the reference in CPU memory"),
    ],
)  # fmt: skip
def test_who_cannot_share_a_gpu_is_told_why(line: str, said: str) -> None:
    """The notes on sharing name engine.colocated."""
    notes = convert([*NAMED, "--train.colocate_all", "--ds.enable_sleep", *line.split()]).notes
    found = [note for note in notes if said in note]
    assert len(found) == 1 and found[0].startswith("train.colocate_all: ") and "engine.colocated" in found[0]
    alone = convert([*NAMED, "--ds.enable_sleep"]).notes
    assert any(note.startswith("ds.enable_sleep: it does nothing without train.colocate_all") for note in alone)


def test_what_has_no_counterpart_is_a_comment(agentrl: Callable[..., Any]) -> None:
    said = agentrl("from-openrlhf", "--", *NAMED, "--ds.packing_samples", "--critic.num_nodes", "2")
    assert said.code == 0 and "# ds.packing_samples: rows are always packed" in said.out
    assert "# critic.num_nodes: the critic trains on the policy's ranks" in said.out
    assert tomllib.loads(said.out)["data"]["path"] == ["d.jsonl"]
    assert agentrl("from-openrlhf").code == 2 and agentrl("from-openrlhf", "--help").code == 0


@pytest.mark.slow
def test_what_is_printed_is_accepted_by_a_dry_run(tmp_path: Path, models: Callable[[str], str]) -> None:
    """The prompts of the example and a reward file in their format; as YAML, which says the same."""
    sums = HERE.parents[1] / "examples" / "sums.jsonl"
    theirs = (
        f"--actor.model_name_or_path {models('tiny-text')} --data.prompt_dataset {sums} --data.input_key question "
        f"--data.label_key answer --reward.remote_url {HERE / 'files' / 'reward.py'} --data.apply_chat_template "
        "--data.max_len 128 --rollout.max_new_tokens 8 --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 "
        "--train.batch_size 16 --actor.num_gpus_per_node 1 --algo.advantage.estimator group_norm --algo.kl.init_coef 0 "
        "--data.max_samples 8 --train.num_episodes 3 --ds.zero_stage 0 --vllm.num_engines 1 --ckpt.output_dir out/run"
    )  # fmt: skip
    program = str(Path(sys.executable).with_name("agentrl"))

    def run(*argv: str) -> str:
        done = subprocess.run([program, *argv], capture_output=True, text=True, timeout=280, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    printed = tomllib.loads(run("from-openrlhf", "--", *theirs.split()))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(printed))
    said = run("train", "--config", "run.yaml", "--dry-run")
    assert "6 steps from 8 tasks" in said and not (tmp_path / "out").exists()
    effective = tomllib.loads(said[said.index("[run]") :])
    assert all(effective[section][key] == value for section, values in printed.items() for key, value in values.items())
