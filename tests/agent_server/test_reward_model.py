"""`agentrl serve reward --model`: a sequence classifier behind both routes, batched across requests."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from agentrl.agent_server.reward_app import reward_app

from agentrl import ConfigError
from agentrl.cli import serve_reward
from agentrl.cli.main import run
from agentrl.reward_actor import is_reward_model
from agentrl.reward_model import RewardModel, spell
from agentrl.supervised.spelling import Speller

from .test_reward_server import post, serving

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4=?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy's tokenizer with a classifier of random weights."""
    import torch
    from agentrl.trainers.tiny import make_tiny
    from transformers import AutoConfig, AutoModelForSequenceClassification

    out = make_tiny("tiny-text", tmp_path_factory.mktemp("reward") / "model", max_steps=0)
    config = AutoConfig.from_pretrained(out)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return RewardModel(str(folder), device="cpu")


def alone(folder: Path, ids: Any) -> float:
    """The score that transformers gives one sequence without padding."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([list(ids)])).logits[0, 0])


def test_a_reply_is_spelled_as_the_policy_spelled_it(model: RewardModel) -> None:
    renderer, speller = model.renderer, Speller(model.renderer)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = renderer.start(CHAT).token_ids
    ids = spell(speller, CHAT, "7<|im_end|>")
    assert ids[: len(start)] == start and ids[-1] == end and end not in ids[len(start) : -1]
    assert spell(speller, "3+4=?", "7") == spell(speller, [{"role": "user", "content": "3+4=?"}], "7")


async def test_both_routes_and_one_batch_for_many_requests(folder: Path, model: RewardModel) -> None:
    calls: list[int] = []

    def judged(prompts: list[Any], completions: list[str], queries: list[str], spelled: list[bool]) -> list[float]:
        calls.append(len(prompts))
        return model(prompts, completions, queries, spelled)

    replies = ["7", "It is seven, as three and four are seven.", "", "8"]
    wanted = [alone(folder, spell(Speller(model.renderer), CHAT, reply)) for reply in replies]
    assert len({round(score, 5) for score in wanted}) == 4
    async with serving(judged, max_batch=16) as (_, http):
        first = asyncio.ensure_future(post(http, "/v1/reward", {"prompts": ["a"], "completions": ["b"]}))
        bodies = [{"prompts": [CHAT], "completions": [reply]} for reply in replies]
        rest = await asyncio.gather(*(post(http, "/v1/reward", body) for body in bodies))
        assert [status for status, _ in (await first, *rest)] == [200] * 5
        assert [reply["rewards"][0] for _, reply in rest] == pytest.approx(wanted, abs=1e-5)
        assert sum(calls) == 5 and len(calls) < 5
        text = "<|im_start|>user\n3+4=?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
        _, reply = await post(http, "/get_reward", {"query": [text], "prompts": [text[:-11]], "labels": [None]})
        ids = model.renderer.tokenizer(text, add_special_tokens=False).input_ids
        assert reply["rewards"] == pytest.approx([alone(folder, ids)], abs=1e-5)
        picture = [{"role": "user", "content": [{"type": "image", "sha256": "0" * 64}]}]
        _, reply = await post(http, "/v1/reward", {"prompts": [picture, 5, "3+4=?"], "completions": ["a", "b", "7"]})
        assert reply["rewards"][:2] == [None, None] and math.isfinite(reply["rewards"][2])


def test_a_text_that_is_too_long_loses_its_beginning(folder: Path, model: RewardModel) -> None:
    assert model.longest is not None
    ids = spell(Speller(model.renderer), "x " * 2 * model.longest, "7")
    assert len(ids) > model.longest
    (score,) = model(["x " * 2 * model.longest], ["7"], [""], [False])
    assert score == pytest.approx(alone(folder, ids[-model.longest :]), abs=1e-5)


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, change in (
        ("policy", {"architectures": ["Qwen2ForCausalLM"]}),
        ("labels", {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}),
        ("vision", {"vision_config": {}}),
        ("missing", {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}),
    ):
        (tmp_path / name).mkdir()
        for file in folder.iterdir():
            (tmp_path / name / file.name).symlink_to(file)
        (tmp_path / name / "config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match="--model"):
            RewardModel(str(tmp_path / name))
    for argv in (
        ["--model", "/nowhere"],
        ["--model", "/nowhere", "--fn", "x.py:f"],
        [],
        ["--fn", "a:b", "--device", "cpu"],
        ["--fn", "a:b", "--no-normalize"],
    ):
        try:
            code = run(["serve", "reward", *argv])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        assert code == 2


async def test_scores_are_normalised_by_what_training_left_unless_the_command_says_not(
    folder: Path, model: RewardModel, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "mean": 0.25, "std": 0.5}))
    (raw,) = model([CHAT], ["7"], [""], [False])
    asked = {"prompts": [CHAT], "completions": ["7"]}
    for flags, wanted in (([], (raw - 0.25) / 0.5), (["--no-normalize"], raw)):
        options = serve_reward._parser().parse_args(["--model", str(tmp_path), "--device", "cpu", *flags])
        async with serving(serve_reward._reward(options)) as (_, http):
            _, reply = await post(http, "/v1/reward", asked)
            assert reply["rewards"] == pytest.approx([wanted], abs=1e-5)


@pytest.mark.parametrize("head", ["score", "value_head"])
def test_a_reward_model_that_openrlhf_saved_is_one(folder: Path, model: RewardModel, tmp_path: Path, head: str) -> None:
    """Its config names a class of their own and no labels; before their 0.11 the head had another name."""
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    config = {key: value for key, value in config.items() if key not in ("id2label", "label2id", "num_labels")}
    theirs = {"architectures": ["RewardModel"], "normalize_reward": False, "mean": 0.25, "std": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config | theirs))
    weights = {
        name.replace("score.", f"{head}."): weight for name, weight in load_file(folder / "model.safetensors").items()
    }
    assert f"{head}.weight" in weights
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    given = ([CHAT], ["7"], [""], [False])
    assert is_reward_model(str(tmp_path))
    assert RewardModel(str(tmp_path), device="cpu", normalized=False)(*given) == pytest.approx(model(*given), abs=1e-5)


@pytest.mark.slow
def test_the_command_serves_a_model_until_it_is_interrupted(folder: Path, model: RewardModel) -> None:
    command = [str(Path(sys.executable).with_name("agentrl")), "serve", "reward", "--model", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("listening on")).split()[-1]
        body = json.dumps({"prompts": [CHAT], "completions": ["7"]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/reward", body), timeout=60) as reply:
            assert json.load(reply)["rewards"] == pytest.approx(model([CHAT], ["7"], [""], [False]), abs=1e-5)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err


def test_a_model_is_a_reward_function_of_lists(model: RewardModel) -> None:
    assert reward_app(model).title == "agentrl reward server"
