"""Command lines of their other programs: what is printed is what our commands take."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import ConfigError
from agentrl.cli import export, serve_reward
from agentrl.config import DpoConfig, RmConfig, SftConfig, SupervisedConfig
from agentrl.config.check_supervised import check_supervised
from agentrl.config.load import option_names
from agentrl.openrlhf.command_line import parse
from agentrl.openrlhf.convert import COMMANDS, RUNS, convert
from agentrl.openrlhf.older import RENAMED_SUPERVISED
from agentrl.openrlhf.options import CHOICES, PROGRAMS, SUPERVISED, options_of

KINDS: dict[str, type[SupervisedConfig]] = {"train_sft": SftConfig, "train_rm": RmConfig, "train_dpo": DpoConfig}
NAMED = "--model.model_name_or_path m --data.dataset d.jsonl"
PAIRS = f"{NAMED} --data.apply_chat_template"
LINES: list[tuple[str, dict[str, Any]]] = [
    (f"train_sft {NAMED} --data.output_key a", {"optim.lr": 5e-6, "train.epochs": 2, "train.max_len": 2048, "train.batch": 128, "data.template": "User: {}\nAssistant: ", "data.answer_key": "a", "model.chat_template": "none", "sft.turns": "last", "data.input_key": "input", "parallel.zero_stage": 2, "data.max_samples": 1_000_000}),
    (f"deepspeed --num_gpus 4 --module openrlhf.cli.train_sft {PAIRS} --data.multiturn --data.input_key messages", {"sft.turns": "all", "model.chat_template": "auto", "data.template": None, "parallel.ranks": 4}),
    (f"torchrun --nproc_per_node=2 -m openrlhf.cli.train_sft -- {PAIRS} --data.output_key a --optim muon --ds.adam_offload", {"optim.name": "muon", "parallel.zero_stage": 0, "parallel.offload_optimizer": False, "parallel.ranks": 2, "data.template": None}),
    (f"train_sft {NAMED} --model.pretrain_mode_enable --data.input_key text --data.max_len 32768", {"sft.pretrain": True, "data.template": None, "train.micro_batch_tokens": 32768, "sft.turns": "all"}),
    (f"train_sft {PAIRS} --eval.dataset e.jsonl --eval.steps 7 --data.max_samples 50 --ckpt.save_steps 9 --ckpt.load_enable", {"data.test_path": ["e.jsonl"], "data.test_split": "train", "eval.every": 7, "eval.samples": 50, "ckpt.every": 9, "run.resume": None}),
    (f"python -m openrlhf.cli.train_rm {PAIRS} --data.prompt_key p --model.margin_loss_enable --model.loss_type log", {"data.input_key": "p", "data.margin_key": "margin", "optim.lr": 9e-6, "train.max_len": 512, "data.template": None}),
    (f"train_rm {NAMED} --data.prompt_key p --data.input_template Q:{{}}", {"data.template": "Q:{}", "model.chat_template": "none"}),
    (f"train_dpo {PAIRS} --ref.model_name_or_path r --ref.offload --model.beta 0.3 --model.nll_loss_coef 0.2 --model.label_smoothing 0.1", {"data.input_key": "chosen", "ref.path": "r", "dpo.beta": 0.3, "dpo.nll_coef": 0.2, "dpo.label_smoothing": 0.1, "optim.lr": 1e-5}),
    (f"{PAIRS} --model.ipo_enable --model.label_smoothing 0.1 --eval.dataset e.jsonl --data.max_len 16000", {"dpo.kind": "ipo", "dpo.label_smoothing": 0.0, "data.test_split": "test", "eval.every": 0, "train.micro_batch_tokens": 32000}),
    (f"train_dpo {PAIRS} --data.dataset d.jsonl,e.jsonl --data.dataset_probs 0.2,0.8 --ds.lora.rank 8 --ds.lora.target_modules q_proj", {"data.probs": [0.2, 0.8], "lora.rank": 8, "lora.alpha": 16, "lora.targets": ["q_proj"]}),
    (f"{NAMED} --data.output_key a --logger.wandb.key SECRET --logger.tensorboard_dir tb --lr_scheduler linear", {"log.wandb": True, "log.wandb_project": "openrlhf_train_sft", "log.tensorboard": True, "optim.schedule": "linear"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_supervised_command_line_is_a_configuration_that_its_command_takes(
    line: str, expected: dict[str, Any]
) -> None:
    words = line.split()
    found = convert(words)
    _, name, _, _ = found.command
    kind = KINDS[f"train_{name}"]
    config = kind.model_validate(tomllib.loads(found.shown()))
    assert kind is found.kind and config.kind == name
    check_supervised(config)
    for option, value in expected.items():
        section, key = option.split(".")
        got = getattr(getattr(config, section), key)
        assert (list(got) if isinstance(got, tuple) else got) == value, option
    assert "SECRET" not in found.shown()
    assert found.shown().startswith(f"# for agentrl {name} --config FILE\n")


@pytest.mark.parametrize("program", SUPERVISED)
def test_every_option_of_a_program_names_one_of_its_command_and_changes_it(program: str) -> None:
    """Of the values: given one that is not the default, the configuration differs, or a note has the reason."""
    known = set(option_names(KINDS[program]))
    values = {"flag": [], "int": ["4"], "float": ["0.25"], "str": ["x"], "floats": ["0.5", "0.75"], "strs": ["a", "b"]}
    needs = {
        "data.dataset_probs": ["--data.dataset_probs", "1"],
        "data.tokenizer_chat_template": ["--data.apply_chat_template", "--data.tokenizer_chat_template", "x"],
        "data.multiturn": ["--data.apply_chat_template", "--data.multiturn"],
        "data.input_template": ["--data.input_template", "{}", *(["--data.output_key" if program == "train_sft" else "--data.prompt_key", "a"])],
        "eval.split": ["--eval.split", "x", "--eval.dataset", "e"],
        "eval.steps": ["--eval.steps", "3", "--eval.dataset", "e"],
        "lr_scheduler": ["--lr_scheduler", "linear"],
        "ds.zero_stage": ["--ds.zero_stage", "1"],
        "ds.lora.target_modules": ["--ds.lora.rank", "2", "--ds.lora.target_modules", "a"],
    }  # fmt: skip
    needs |= {f"ds.lora.{name}": ["--ds.lora.rank", "2", f"--ds.lora.{name}", "1"] for name in ("alpha", "dropout")}
    needs |= {f"logger.wandb.{name}": ["--logger.wandb.key", "k", f"--logger.wandb.{name}", "x"] for name in ("org", "group", "project")}  # fmt: skip
    needs["ds.lora.dropout"][-1] = "0.5"
    for option in options_of(program).values():
        named = [word.strip(",:;") for word in option.ours.split() if word.strip(",:;") in known]
        assert option.reason is not None or named, option
        if option.name == "ds.param_dtype":
            continue
        given = CHOICES.get(option.name, ())[-1:] or values[option.kind]
        words = [program, *NAMED.split(), *needs.get(option.name, [f"--{option.name}", *given])]
        less = (
            [word for word in needs.get(option.name, []) if word != f"--{option.name}"] if option.kind == "flag" else []
        )
        found, before = convert(words), convert([program, *NAMED.split(), *less])
        if option.reason is not None:
            assert f"{option.name}: {option.reason}" in found.notes
        else:
            assert found.shown() != before.shown(), option


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"train_sft {NAMED} --data.multiturn", "data.multiturn is for whole conversations"),
        (f"train_sft {NAMED} --model.pretrain_mode_enable --data.output_key a", "Join the two columns"),
        (f"train_sft {NAMED} --data.chosen_key c", "train_sft has no option --data.chosen_key"),
        (f"{NAMED} --data.chosen_key c", "train_rm, train_dpo have these options: put the program's name before"),
        (f"train_dpo {NAMED} --ds.param_dtype fp16", "no float16 training"),
        (f"train_rm {NAMED} --lr_scheduler polynomial", "lr_scheduler polynomial: here it is one of"),
        (f"train_rm {NAMED} --data.dataset_probs SECRET", "are numbers with commas between"),
        ("train_sft --pretrain m --dataset d --max_epochs 2", "--pretrain is --model.model_name_or_path, --dataset is --data.dataset, --max_epochs is --train.max_epochs"),
    ],
)  # fmt: skip
def test_what_cannot_be_of_a_supervised_line_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        convert(line.split()).nested()
    assert "SECRET" not in str(error.value)


def test_bare_options_are_of_the_program_that_has_the_most_of_them() -> None:
    lines = {
        "train_ppo_ray": "--ckpt.output_dir o --train.seed 1",
        "train_sft": f"{NAMED} --data.output_key a",
        "train_dpo": f"{NAMED} --model.beta 1",
        "train_rm": f"{NAMED} --model.margin_loss_enable",
        "serve_rm": "--reward.model_name_or_path m --port 1",
        "lora_combiner": "--lora_path l --model_path m --output_path o",
    }
    assert {program: parse(line.split()).program for program, line in lines.items()} == {p: p for p in lines}
    assert set(lines) == set(PROGRAMS) == RUNS.keys() | COMMANDS.keys()
    assert set(RENAMED_SUPERVISED.values()) <= {name for p in PROGRAMS for name in options_of(p)}


def test_the_other_programs_are_commands_that_our_parsers_read(agentrl: Callable[..., Any]) -> None:
    found = convert(
        [
            "python",
            "-m",
            "openrlhf.cli.serve_rm",
            "--reward.model_name_or_path",
            "rm",
            "--batch_size",
            "8",
            "--ds.packing_samples",
        ]
    )
    options = serve_reward._parser().parse_args(found.command[3:])
    assert (options.model, options.port, options.host, options.max_batch) == ("rm", 5000, "0.0.0.0", 8)
    assert options.no_normalize and options.token_file == "TOKEN_FILE"
    assert any("wants a token" in note for note in found.notes)
    assert "ds.packing_samples: what is judged at once is padded" in found.notes
    local = convert(
        ["serve_rm", "--reward.model_name_or_path", "rm", "--host", "127.0.0.1", "--reward.normalize_enable"]
    ).command
    assert "--no-normalize" not in local and "--token-file" not in local
    said = agentrl(
        "from-openrlhf", "--", *["lora_combiner", "--model_path", "m", "--lora_path"], "my runs/x", "--output_path", "o"
    )
    assert said.code == 0 and said.out.splitlines()[-1] == "agentrl export 'my runs/x' o --model m"
    export._parser().parse_args(
        convert(["lora_combiner", "--lora_path", "l", "--model_path", "m", "--output_path", "o"]).command[2:]
    )


@pytest.mark.slow
def test_what_is_printed_of_each_supervised_line_is_accepted_by_a_dry_run(
    tmp_path: Path, models: Callable[[str], str], agentrl: Callable[..., Any]
) -> None:
    """Prompts with answers and the default template, conversations, pairs with and without a prompt."""
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    wrong = [turns[0], {"role": "assistant", "content": "3"}]
    row = {
        "input": "1+1?",
        "answer": "2",
        "messages": turns,
        "chosen": turns,
        "rejected": wrong,
        "good": "2",
        "bad": "3",
    }
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    named = (
        f"--model.model_name_or_path {models('tiny-text')} --data.dataset {data} --data.max_len 64 --train.batch_size 2"
    )
    for line, said in (
        (f"train_sft {named} --data.output_key answer", "4 examples"),
        (f"train_sft {named} --data.input_key messages --data.apply_chat_template --data.multiturn", "4 examples"),
        (f"train_sft {named} --model.pretrain_mode_enable", "4 examples"),
        (f"train_rm {named} --data.apply_chat_template", "4 pairs"),
        (f"train_dpo {named} --data.prompt_key input --data.chosen_key good --data.rejected_key bad", "4 pairs"),
    ):
        found = convert(line.split())
        (tmp_path / "run.toml").write_text(found.shown())
        done = agentrl(found.command[1], "--config", str(tmp_path / "run.toml"), "--dry-run")
        assert done.code == 0 and said in done.out, (line, done.out, done.err)
