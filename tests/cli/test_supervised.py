"""`agentrl sft | rm | dpo`: what is refused before anything starts, and what a dry run shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl import ConfigError
from agentrl.cli.policy import choose_model, with_folders
from agentrl.config import Config, DpoConfig, RmConfig
from agentrl.config.dump import to_toml

from ..conftest import Said

CHAT = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sft"], "say which with --data.path"),
        (["sft", "--data.path", "no.jsonl"], "there is no such file"),
        (["sft", "--data.path", "chat.jsonl", "--data.label-key", "x"], "--data.label-key is not used by agentrl sft"),
        (["sft", "--data.path", "chat.jsonl", "--sft.pretrain", "--sft.turns", "last"], "--sft.turns is not used with"),
        (["sft", "--data.path", "chat.jsonl", "--data.template", "Q: {}"], "--data.template is not used without"),
        (
            ["sft", "--data.path", "chat.jsonl", "--data.template", "Q:", "--data.answer-key", "a"],
            "it must have {} once",
        ),
        (["sft", "--data.path", "chat.jsonl", "--data.probs", "1", "2"], "--data.probs gives 2 numbers for 1 datasets"),
        (["sft", "--data.path", "chat.jsonl", "--data.probs", "0"], "they must be at least 0, and one of them above"),
        (["sft", "--data.path", "chat.jsonl", "--sft.min-score", "1"], "--sft.min-score is not used without"),
        (
            ["rm", "--data.path", "pairs.jsonl", "--data.min-pixels", "9", "--data.max-pixels", "4"],
            "--data.min-pixels 9 is more",
        ),
        (
            ["rm", "--data.path", "pairs.jsonl", "--optim.warmup", "3", "--optim.warmup-ratio", "0.1"],
            "--optim.warmup is not used with",
        ),
        (["rm", "--data.path", "pairs.jsonl", "--log.wandb-project", "p"], "--log.wandb-project is not used without"),
        (["sft", "--data.path", "weight.jsonl"], "row 0 of weight.jsonl: message 1: its weight is 0.5; it is 0 or 1"),
        (
            ["rm", "--data.path", "pairs.jsonl", "--data.template", "{}", "--data.input-key", "chosen"],
            "--data.template is not used where --data.chosen-key holds",
        ),
        (
            ["sft", "--data.path", "chat.jsonl", "--train.steps", "3", "--train.epochs", "2"],
            "--train.epochs is not used",
        ),
        (
            ["sft", "--data.path", "chat.jsonl", "--eval.every", "3"],
            "--eval.every is not used without --data.test-path",
        ),
        (["sft", "--data.path", "chat.jsonl", "--train.max-len", "9999"], "was made for"),
        (["sft", "--data.path", "chat.jsonl", "--data.input-key", "x"], "no column 'x'"),
        (["dpo", "--data.path", "pairs.jsonl", "--train.micro-batch-tokens", "100"], "does not hold both answers"),
        (["dpo", "--data.path", "pairs.jsonl", "--data.rejected-key", "x"], "--data.rejected-key"),
        (["dpo", "--data.path", "pairs.jsonl", "--dpo.kind", "ipo", "--dpo.label-smoothing", "0.1"], "not used with"),
        (["dpo", "--data.path", "pairs.jsonl", "--data.margin-key", "m"], "margins are for reward models"),
        (["dpo", "--data.path", "pairs.jsonl", "--ref.path", "/no"], "--ref.path /no"),
        (["dpo", "--data.path", "pairs.jsonl", "--lora.path", "~/no"], "--lora.path ~/no: there is no such folder"),
        (["rm", "--data.path", "pairs.jsonl", "--lora.path", "."], "--lora.path .: the folder holds no adapter_config"),
        (["rm", "--data.path", "pairs.jsonl", "--lora.alpha", "3"], "--lora.alpha is not used without --lora.rank"),
        (["rm", "--data.path", "pairs.jsonl", "--dpo.beta", "1"], "--dpo.beta"),
        (["rm", "--data.path", "pairs.jsonl", "--ckpt.best-by", "eval/loss"], "the lowest loss makes the best"),
        (["rm", "--data.path", "pairs.jsonl", "--run.resume", "latest"], "--resume needs --run.name"),
        (["rm", "--data.path", "pairs.jsonl", "--parallel.ranks", "64"], "--parallel.ranks 64 is more than"),
    ],
    ids=lambda value: " ".join(value[3:] or value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said_in_one_paragraph(
    agentrl: Callable[..., Said], models: Callable[[str], str], argv: list[str], said: str
) -> None:
    Path("chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    Path("pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    half = [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0.5}]
    Path("weight.jsonl").write_text(json.dumps({"messages": half}) + "\n")
    result = agentrl(*argv, "--model", models("tiny-text"), "--dry-run")
    assert result.code == 2 and said in result.err and "Traceback" not in result.err
    assert not Path("runs").exists()


def test_trainers_get_the_folders_that_were_checked(
    models: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home directory and a relative path are those of the command, also for a trainer on another machine's disk."""
    home = tmp_path / "home"
    (home / "adapter").mkdir(parents=True)
    (home / "adapter" / "adapter_config.json").write_text("{}")
    (home / "other").symlink_to(models("tiny-text"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    folder = str((home / "other").resolve())
    given = Config.model_validate(
        {
            "ref": {"path": "~/other"},
            "critic": {"path": "other"},
            "teacher": {"path": folder},
            "lora": {"path": "~/adapter"},
        }
    )
    whole = with_folders(given)
    assert [whole.ref.path, whole.critic.path, whole.teacher.path] == [folder] * 3
    assert whole.lora.path == str(home.resolve() / "adapter")
    assert given.ref.path == "~/other", "what is saved and compared at a resume is what was given"
    dpo = with_folders(DpoConfig.model_validate({"ref": {"path": "~/other"}, "lora": {"path": "someone/adapter"}}))
    assert (dpo.ref.path, dpo.lora.path) == (folder, "someone/adapter")
    assert with_folders(RmConfig()) == RmConfig()


def test_a_resumed_run_keeps_its_kind_and_its_data(agentrl: Callable[..., Said], models: Callable[[str], str]) -> None:
    """What a run wrote is made up here: its configuration, and a checkpoint that is only looked for."""
    Path("pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    checkpoint = Path("runs/first/checkpoints/step_000001")
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text(json.dumps({"step": 1}))
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    options = {"run": {"name": "first"}, "model": {"path": models("tiny-text")}, "data": {"path": ["pairs.jsonl"]}}
    Path("runs/first/config.toml").write_text(to_toml(RmConfig.model_validate(options)))
    resume = ["--resume", "latest", "--run.name", "first", "--dry-run"]
    assert agentrl("rm", *resume, "--train.epochs", "2").code == 0
    for argv, said in (
        (["rm", "--data.path", "other.jsonl"], "began with data.path = ['pairs.jsonl']"),
        (["rm", "--lora.rank", "4"], "began with lora.rank = "),
        (["rm", "--train.batch", "16"], "began with train.batch = 32, and now it is 16"),
        (["rm", "--data.max-samples", "1"], "began with data.max_samples = None, and now it is 1"),
        (["dpo"], "is a run of agentrl rm, and does not go on as one of agentrl dpo"),
        (["train"], "is a run of agentrl rm, and does not go on as one of agentrl train"),
    ):
        result = agentrl(*argv, *resume)
        assert result.code == 2 and said in result.err.replace("\n", " "), result.err


def test_a_model_that_does_not_load_is_told_before_anything_starts(
    agentrl: Callable[..., Said], models: Callable[[str], str], tmp_path: Path
) -> None:
    """Of an unknown type, with code of its own, without weights, or with half of them; and as the reference."""
    Path("pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    good = Path(models("tiny-text"))
    config, weights = json.loads((good / "config.json").read_text()), (good / "model.safetensors").read_bytes()

    def folder(name: str, changes: dict[str, object], stored: bytes | None) -> str:
        shutil.copytree(good, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        (tmp_path / name / "model.safetensors").unlink()
        if stored is not None:
            (tmp_path / name / "model.safetensors").write_bytes(stored)
        return str(tmp_path / name)

    unknown = folder("unknown", {"model_type": "foo"}, weights)
    own_code = folder("own", {"model_type": "foo", "auto_map": {"AutoConfig": "own.Config"}}, weights)
    for name, said in (
        (unknown, "model type `foo`"),
        (own_code, "--model.trust-remote-code"),
        (folder("empty", {}, None), "holds no weights"),
        (folder("half", {}, weights[: len(weights) // 2]), "model.safetensors cannot be read"),
    ):
        argv = ["dpo", "--data.path", "pairs.jsonl", "--dry-run"]
        for options in (["--model", name], ["--model", str(good), "--ref.path", name]):
            result = agentrl(*argv, *options)
            assert result.code == 2 and said in " ".join(result.err.split()), (options, result.err)
        with pytest.raises(ConfigError, match=said):
            choose_model(Config.model_validate({"model": {"path": name}}), False, 0.0)
        with pytest.raises(ConfigError, match=said):
            with_folders(Config.model_validate({"teacher": {"path": name}}))


def test_a_dry_run_shows_the_plan_and_a_configuration_that_gives_the_same(
    agentrl: Callable[..., Said], models: Callable[[str], str]
) -> None:
    Path("pairs.jsonl").write_text(10 * (json.dumps(PAIR) + "\n"))
    options = [
        "--data.path",
        "pairs.jsonl",
        "--model",
        models("tiny-text"),
        "--train.batch",
        "4",
        "--train.epochs",
        "2",
    ]
    for kind, shown in (("rm", "lr 0.001 (linear)"), ("dpo", "lr 0.0001 (linear)")):
        first = agentrl(kind, *options, "--dry-run")
        assert first.code == 0 and shown in first.out
        assert "10 pairs in updates of 4: 3 updates a pass, 6 updates in all" in first.out
        Path("run.toml").write_text(first.out[first.out.index("[run]") :])
        assert agentrl(kind, "--config", "run.toml", "--dry-run").out == first.out
    assert "reference: the model itself" in first.out
    assert not Path("runs").exists()


def test_a_tokenizer_without_a_template_is_told_what_to_do(
    agentrl: Callable[..., Said], models: Callable[[str], str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(models("tiny-text"), bare)
    (bare / "chat_template.jinja").unlink()
    Path("chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    result = agentrl("sft", "--data.path", "chat.jsonl", "--model", str(bare), "--dry-run")
    assert result.code == 2 and "--model.chat-template" in result.err
    Path("text.jsonl").write_text(json.dumps({"text": "once upon a time"}) + "\n")
    plain = ["--data.path", "text.jsonl", "--data.input-key", "text", "--sft.pretrain"]
    assert agentrl("sft", *plain, "--model", str(bare), "--dry-run").code == 0, "plain text needs none"
    result = agentrl(
        "sft", "--data.path", "chat.jsonl", "--model", str(bare), "--model.chat-template", "none", "--dry-run"
    )
    assert result.code == 0 and "1 examples" in result.out


def test_best_of_keeps_one_episode_a_draw(agentrl: Callable[..., Said], models: Callable[[str], str]) -> None:
    command = ["rollout", "--env", "calculator_math", "--engine", "random", "--model", models("tiny-text"), "-n", "3"]
    assert "--samples is not used" in agentrl(*command, "--best-of", "4", "--samples", "2", "--out", "a.jsonl").err
    assert "--out FILE.jsonl" in agentrl(*command, "--best-of", "4").err
    assert agentrl(*command, "--best-of", "4", "--out", "best.jsonl", "--rollout.max-new-tokens", "8").code == 0
    kept = [json.loads(line) for line in Path("best.jsonl").read_text().splitlines()]
    assert sorted(line["draw"] for line in kept) == [0, 1, 2]
    assert all(line["tools"][0]["function"]["name"] == "calculator" for line in kept)
    shown = agentrl("sft", "--data.path", "best.jsonl", "--model", models("tiny-text"), "--dry-run")
    assert shown.code == 0 and "trained" in shown.out
