"""Configuration from files and flags: what is accepted, what is refused and how, and the way through TOML and back."""

from __future__ import annotations

import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import (
    Config,
    DpoConfig,
    EngineSection,
    EnvSection,
    ModelSection,
    RewardSection,
    RmConfig,
    RolloutSection,
    SftConfig,
)
from agentrl.config.dump import to_toml
from agentrl.config.load import parse_command, read_file, repeat_flags, validated, with_stored_config
from agentrl.config.resumed import check_kind, check_resumed
from agentrl.errors import ConfigError


class Command(Config):
    config: Annotated[str | None, tyro.conf.arg(name="config")] = None


def parse(*argv: str) -> Command:
    return parse_command(Command, argv, prog="agentrl test", description="")


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_flags_take_dash_and_underscore_and_short_forms() -> None:
    config = parse("--rollout.n_samples", "3", "--rollout.max-new-tokens", "5", "--env", "a", "--algo=grpo")
    assert (config.rollout.n_samples, config.rollout.max_new_tokens) == (3, 5)
    assert (config.env.name, config.algo.name) == (["a"], "grpo")


def test_file_keys_take_dash_and_underscore(write) -> None:
    assert parse("--config", write("[rollout]\nn-samples = 3")).rollout.n_samples == 3


def test_flags_win_over_the_file(write) -> None:
    path = write("[rollout]\nn_samples = 3\nmax_turns = 2\n[env]\nname = 'a'")
    config = parse("--rollout.n-samples", "4", f"--config={path}")
    assert (config.rollout.n_samples, config.rollout.max_turns, config.env.name) == (4, 2, ["a"])


def test_a_single_name_stands_for_a_list_of_one(write) -> None:
    config = parse(
        "--config", write("env: {name: a}\nagent: {name: b}\nreward: {name: c}\ndata: {path: d}", "run.yaml")
    )
    assert (config.env.name, config.agent.name, config.reward.name, config.data.path) == (["a"], ["b"], ["c"], ["d"])


def test_a_flag_back_to_its_default_wins_over_the_file(write) -> None:
    path = write("[rollout]\nn_samples = 3\n[model]\npath = 'x'")
    assert parse("--config", path, "--rollout.n-samples", "8").rollout.n_samples == 8
    assert parse("--config", path, "--model", "None").model.path is None


def test_a_list_on_the_command_line_replaces_the_files(write) -> None:
    path = write("[env]\nopt = ['a=1', 'b=2']\n[reward]\nname = ['f.py:x']\nweights = [1.0]")
    assert parse("--config", path).env.opt == ["a=1", "b=2"]
    config = parse(
        "--config", path, "--env.opt", "c=3", "--env.opt", "d=4", "--reward", "g.py:y", "--reward.weights", "2"
    )
    assert config.env.opt == ["c=3", "d=4"]
    assert (config.reward.name, config.reward.weights) == (["g.py:y"], [2.0])
    path = write("env: {name: a}\ndata: {path: b}\nreward: {name: c}\nlora: {targets: d}", "run.yaml")
    config = parse("--config", path, "--env", "x", "--data.path", "y", "--reward=z", "--lora.targets", "k")
    assert (config.env.name, config.data.path, config.reward.name, config.lora.targets) == (["x"], ["y"], ["z"], ["k"])


def test_repeatable_flags_also_take_several_values() -> None:
    assert parse("--env.opt", "a=1", "b=2", "--env", "x").env.opt == ["a=1", "b=2"]
    assert repeat_flags(["--f", "1", "2", "--g", "3", "4", "--f", "5"], {"--f"}) == (
        ["--f", "1", "--f", "2", "--g", "3", "4", "--f", "5"]
    )


def test_yaml_values_keep_their_meaning(write) -> None:
    path = write("eval: {enable: false}\noptim: {lr: 1e-6}\nreward: {weights: []}\nrollout:\n", "run.yaml")
    config = validated(Command, read_file(path), path)
    assert config.eval.enable is False
    assert config.optim.lr == 1e-6
    assert config.reward.weights == []


def test_a_mark_at_the_start_of_a_file_is_no_key(tmp_path: Path) -> None:
    for name, text in (("run.toml", "[train]\nsteps = 4"), ("run.yaml", "train: {steps: 4}")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert parse("--config", str(tmp_path / name)).train.steps == 4


def test_an_empty_file_is_no_options(write) -> None:
    assert parse("--config", write("", "run.yaml")).rollout == RolloutSection()


def test_no_environment_variable_is_expanded(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "shown")
    config = parse("--config", write("[env]\nname = '$SECRET'\nopt = ['a=${SECRET}']"), "--run.name", "~/$SECRET")
    assert (config.env.name, config.env.opt, config.run.name) == (["$SECRET"], ["a=${SECRET}"], "~/$SECRET")


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("[rollout]\nn_sample = 3", "rollout.n_sample", "rollout.n_samples"),
        ("[rolout]\nx = 3", "rolout", "rollout"),
        ("[algo.filter]\nenabel = true", "algo.filter.enabel", "algo.filter.enable"),
        ("[train]\nlr = 1.0", "train.lr", "optim.lr"),
        ("n_samples = 3", "n_samples", "rollout.n_samples"),
    ],
)
def test_an_unknown_key_in_a_file_names_the_nearest_right_one(write, text: str, wrong: str, right: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        parse("--config", path)
    message = str(raised.value)
    assert path in message and f"no option {wrong}." in message and right in message


@pytest.mark.parametrize(
    ("argv", "right"),
    [
        (["--rollout.n-sample", "3"], "--rollout.n-samples"),
        (["--rolout.n-samples", "3"], "--rollout.n-samples"),
        (["--algo.filter.enabel", "True"], "--algo.filter.enable"),
        (["--env.op", "a=1"], "--env.opt"),
    ],
)
def test_an_unknown_flag_exits_with_2_and_names_the_nearest_right_one(argv, right, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(*argv)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert argv[0] in said and right in said


def test_no_prefix_of_a_flag_is_guessed(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--rollout.n-sampl", "3")
    assert "Unrecognized" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rollout.n-samples", "0"], "--rollout.n-samples 0: it should be greater than or equal to 1."),
        (["--algo.filter.max-rounds", "0"], "--algo.filter.max-rounds 0: it should be greater than or equal to 1."),
        (["--optim.lr", "0"], "--optim.lr 0.0: it should be greater than 0."),
    ],
)
def test_a_value_out_of_range_is_one_sentence_in_the_users_terms(argv, said, capsys) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(*argv)
    assert str(raised.value) == said
    assert capsys.readouterr().err == ""


def test_a_value_of_the_wrong_type_in_a_file_names_the_file_and_the_key(write) -> None:
    path = write("[rollout]\nn_samples = 'many'\n[env]\nopt = {level = 'easy'}")
    with pytest.raises(ConfigError) as raised:
        parse("--config", path)
    said = str(raised.value)
    assert said.startswith(path) and "rollout.n_samples = 'many'" in said and "env.opt = {'level': 'easy'}" in said


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("[rollout", "run.toml", "cannot be read"),
        ("a: [", "run.yaml", "cannot be read"),
        ("- a", "run.yaml", "must hold sections"),
        ("rollout = 3", "run.toml", "rollout = 3: it should be a section with options"),
        ("optim: {lr: 1}\noptim: {warmup: 3}", "run.yaml", "optim stands there twice"),
        ("optim:\n  lr: 1\n  betas: [0, 0]\n  lr: 2", "run.yaml", "lr stands there twice"),
        ("[train]\nbatch-groups = 3\nbatch_groups = 4", "run.toml", "batch_groups stands there twice"),
        ("train.steps: 4", "run.yaml", "train.steps is no key: steps stands in the section train"),
        ("algo.kl.coef: 4", "run.yaml", "algo.kl.coef is no key: coef stands in the section algo.kl"),
    ],
)
def test_a_file_that_is_none_says_so(write, text: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("--config", write(text, name))


def test_a_missing_file_says_so() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        parse("--config", "/nowhere/run.toml")


def test_the_last_config_flag_counts(write) -> None:
    first, second = write("[rollout]\nn_samples = 3"), write("[rollout]\nn_samples = 4", "second.toml")
    assert parse("--config", first, "--config", second).rollout.n_samples == 4


def test_booleans() -> None:
    assert parse("--eval.no-enable").eval.enable is False
    assert parse("--eval.enable").eval.enable is True
    assert parse("--rollout.partial", "True").rollout.partial is True
    assert parse("--rollout.partial", "None").rollout.partial is None


def test_help_exits_with_0(capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        parse("--help")
    assert raised.value.code == 0
    assert "--rollout.n-samples" in capsys.readouterr().out


text = st.text(st.characters(codec="utf-8"))
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
configs = st.builds(
    Config,
    env=st.builds(EnvSection, name=st.none() | text, opt=st.lists(text)),
    model=st.builds(ModelSection, path=st.none() | text, trust_remote_code=st.booleans()),
    reward=st.builds(
        RewardSection, name=st.lists(text), weights=st.lists(st.floats(allow_nan=False, allow_infinity=False))
    ),
    rollout=st.builds(
        RolloutSection,
        n_samples=st.integers(1, 2**70),
        temperature=st.floats(allow_nan=False, allow_infinity=False),
        partial=st.none() | st.booleans(),
        call_timeout_s=positive,
        max_error_rate=st.floats(0, 1),
    ),
    engine=st.builds(EngineSection, args=st.lists(text), gpus=st.just("auto") | positive),
)


@settings(deadline=None)
@given(configs)
def test_what_is_dumped_loads_as_the_same(config: Config) -> None:
    dumped = to_toml(config)
    assert validated(Config, tomllib.loads(dumped), "dump") == config
    assert to_toml(validated(Config, tomllib.loads(dumped), "dump")) == dumped


def test_a_run_goes_on_with_its_own_configuration(tmp_path: Path) -> None:
    run = tmp_path / "calc"
    run.mkdir()
    (run / "config.toml").write_text('[env]\nname = "calculator_math"\n')
    by_name = ["--resume", "latest", "--run.dir", str(tmp_path), "--run.name", "calc"]
    assert with_stored_config(by_name, "train") == [*by_name, "--config", str(run / "config.toml")]
    by_path = ["--resume", str(run / "checkpoints" / "step_000002")]
    assert with_stored_config(by_path, "train") == [
        *by_path, "--run.dir", str(tmp_path), "--run.name", "calc", "--config", str(run / "config.toml"),
    ]  # fmt: skip
    own = [*by_name, "--config", "other.toml"]
    assert with_stored_config(own, "train") == own
    assert with_stored_config(["--run.name", "calc"], "train") == ["--run.name", "calc"]
    with pytest.raises(ConfigError, match=r"there is no run .*nothing-there"):
        with_stored_config(["--resume", "latest", "--run.name", "nothing-there"], "train")
    with pytest.raises(ConfigError, match=r"calc is a run of agentrl train, and does not go on as one of agentrl sft"):
        with_stored_config(by_name, "sft")


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("env", "name", "screenshot_math", False),
        ("data", "split", "test", False),
        ("data", "probs", [1.0, 2.0], False),
        ("data", "max_samples", 5, False),
        ("data", "test_path", ["t.jsonl"], True),
        ("algo", "name", "ppo", False),
        ("run", "seed", 3, False),
        ("train", "steps", 99, True),
        ("optim", "name", "sgd", False),
        ("optim", "lr", 1e-5, True),
        ("optim", "weight_decay", 0.1, True),
    ],
)
def test_what_a_resumed_run_may_change(section: str, key: str, value: Any, allowed: bool) -> None:
    stored = Config.model_validate({"env": {"name": "calculator_math"}, "run": {"name": "calc"}})
    changed = stored.model_dump()
    changed[section][key] = value
    config = Config.model_validate(changed)
    with nullcontext() if allowed else pytest.raises(ConfigError, match=rf"began with {section}\.{key} = "):
        check_resumed(config, stored)


KINDS = {"sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}


@pytest.mark.parametrize("kind", [*KINDS, "train"])
def test_a_stored_configuration_says_of_which_kind_its_run_is(kind: str) -> None:
    stored = tomllib.loads(to_toml({**KINDS, "train": Config}[kind]()))
    check_kind(kind, stored, "runs/a")
    for other in {*KINDS, "train"} - {kind}:
        with pytest.raises(
            ConfigError, match=f"runs/a is a run of agentrl {kind}, and does not go on as one of agentrl {other}"
        ):
            check_kind(other, stored, "runs/a")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("run.seed", 3, False),
        ("model.path", "b", False),
        ("data.path", ["a.jsonl", "b.jsonl"], False),
        ("lora.rank", 4, False),
        ("optim.name", "muon", False),
        ("train.epochs", 2, True),
        ("data.test_path", ["t.jsonl"], True),
    ],
)
def test_what_a_resumed_supervised_run_may_change(kind: str, option: str, value: Any, allowed: bool) -> None:
    stored = KINDS[kind].model_validate({"model": {"path": "a"}, "data": {"path": ["a.jsonl"]}, "run": {"name": "r"}})
    changed = stored.model_dump()
    section, _, key = option.partition(".")
    changed[section][key] = value
    config = KINDS[kind].model_validate(changed)
    with (
        nullcontext() if allowed else pytest.raises(ConfigError, match=f"began with {option} = .* --model runs/r/final")
    ):
        check_resumed(config, stored)


def test_a_resumed_dpo_run_keeps_its_reference() -> None:
    with pytest.raises(ConfigError, match=r"began with ref.path = None, and now it is 'b'"):
        check_resumed(DpoConfig.model_validate({"ref": {"path": "b"}}), DpoConfig())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.json", "{}", r"a configuration is a \.toml, \.yaml or \.yml file"),
        ("c.yaml", "run: [1,\n  2\nmodel: }", "cannot be read: while parsing"),
        ("c.toml", "[run\n", "cannot be read: "),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_one_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_file(str(tmp_path / name))
    assert "\n" not in str(caught.value)
