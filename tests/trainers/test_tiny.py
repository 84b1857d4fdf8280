"""The tiny policies: what is built, how it renders, and where the warm start lands."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.trainers.tiny import KINDS, cached_tiny, make_tiny, tiny_path
from agentrl.trainers.tiny.collate import IGNORED, Collator
from agentrl.trainers.tiny.demonstrations import CalculatorDemonstrator, ScreenshotDemonstrator
from agentrl.trainers.tiny.warm_start import RECIPES, exact_reply_probability, warm_started

from agentrl.env import Task
from agentrl.errors import ConfigError
from agentrl.messages import normalize
from agentrl.registry import lookup
from agentrl.renderer import Renderer
from agentrl.torchvision_ops import ensure_torchvision_imports

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both policies without a warm start."""
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny(kind, root / kind, max_steps=0) for kind in KINDS}


@pytest.fixture(scope="module")
def processor(folders: dict[str, Path]) -> Any:
    ensure_torchvision_imports()
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folders["tiny-vlm"])


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Any:
    ensure_torchvision_imports()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folders["tiny-text"])


def first_prompt(processor: Any, env_name: str) -> Any:
    env = lookup("env", env_name)()
    observation, _ = env.reset(options={"task": type(env).tasks("train")[0]})
    return Renderer(processor).start(normalize(observation), env.tools)


def test_both_load_with_the_auto_classes(folders: dict[str, Path], processor: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    vlm = AutoModelForImageTextToText.from_pretrained(folders["tiny-vlm"])
    text = AutoModelForCausalLM.from_pretrained(folders["tiny-text"])
    assert type(vlm).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(text).__name__ == "Qwen3ForCausalLM"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    for model, tok in ((vlm, processor.tokenizer), (text, tokenizer)):
        assert 400_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
        assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
        assert model.generation_config.eos_token_id == tok.eos_token_id == tok.convert_tokens_to_ids("<|im_end|>")
        assert model.config.get_text_config().vocab_size == len(tok) == 512


def test_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("123+4=") == ["1", "2", "3", "+", "4", "="]
    assert len(tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)) == 3
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call> é 漢\n'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text, "tool markers are kept, special tokens are not"
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""


def test_one_placeholder_a_patch(processor: Any) -> None:
    prompt = first_prompt(processor, "screenshot_math")
    pictures = processor.image_processor(images=[prompt.images[0].pil], return_tensors="pt")
    assert pictures["image_grid_thw"].tolist() == [[1, 4, 6]], "the page keeps its size: 56 x 84 in patches of 14"
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert prompt.token_ids.count(pad) == len(pictures["pixel_values"]) == 24
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], add_generation_prompt=True)
    made = processor(text=[text], images=[prompt.images[0].pil])
    assert tuple(made["input_ids"][0]) == prompt.token_ids
    assert len(prompt) == 34


def test_the_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "17*23"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "17*23=?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "391"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "392"}]},
        {"role": "assistant", "content": "391"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.\ntools: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\n17*23=?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>391</tool_response><tool_response>392</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n391<|im_end|>\n"
    )
    assert len(first_prompt(tokenizer, "calculator_math")) < 40


def test_demonstrations_are_what_a_rollout_sees(processor: Any) -> None:
    demonstrator = ScreenshotDemonstrator(processor)
    decode = processor.tokenizer.decode
    for turns in (1, 2, 3):
        shown = demonstrator.draw(random.Random(turns), turns, 0.0)
        assert len(shown.images) == turns
        prompt, reply = decode(shown.token_ids[: shown.target]), decode(shown.token_ids[shown.target :])
        assert prompt.endswith("<|im_start|>assistant\n") and reply.endswith("<|im_end|>")
        first, second, answer = reply.removesuffix("<|im_end|>").split("=")
        assert eval(first) == eval(second) == int(answer)
        assert ("higher<|im_end|>" in prompt or "lower<|im_end|>" in prompt) is (turns > 1)


def test_a_slip_is_wrong(processor: Any, tokenizer: Any) -> None:
    demonstrator = ScreenshotDemonstrator(processor)
    steps = set()
    for seed in range(12):
        slipped = demonstrator.draw(random.Random(seed), 1, 1.0)
        sum_, *worked, answer = processor.tokenizer.decode(slipped.token_ids[slipped.target : -1]).split("=")
        assert eval(sum_) != int(answer)
        steps.add(len(worked))
    assert steps == {0, 1}, "some stop half-way, some give a wrong number"
    calculator = CalculatorDemonstrator(tokenizer)
    right = calculator.draw(random.Random(3), 2, 0.0)
    wrong = calculator.draw(random.Random(3), 2, 1.0)
    assert right.token_ids[: right.target] == wrong.token_ids[: wrong.target]
    assert right.token_ids[right.target :] != wrong.token_ids[wrong.target :]


def test_held_out_demonstrations_are_of_test_tasks(processor: Any) -> None:
    held_out = ScreenshotDemonstrator(processor).held_out(11)
    assert len({shown.token_ids[shown.target :] for shown in held_out}) == 11
    assert [shown.token_ids for shown in held_out] == [
        shown.token_ids for shown in ScreenshotDemonstrator(processor).held_out(11)
    ]


def test_labels_cover_the_last_reply_only(processor: Any) -> None:
    demonstrator = ScreenshotDemonstrator(processor)
    batch = [demonstrator.draw(random.Random(seed), turns, 0.0) for seed, turns in ((0, 1), (1, 2))]
    inputs, labels = Collator(processor)(batch)
    for row, shown in enumerate(batch):
        kept = labels[row] != IGNORED
        assert tuple(inputs["input_ids"][row][kept].tolist()) == shown.token_ids[shown.target :]
    assert inputs["image_grid_thw"].shape == (3, 3) and inputs["pixel_values"].shape == (72, 588)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_every_time(kind: str) -> None:
    before = torch.get_num_threads(), torch.random.get_rng_state()
    stages: list[str] = []
    first, _ = warm_started(kind, seed=3, max_steps=3, progress=lambda stage, share: stages.append(stage))
    again, _ = warm_started(kind, seed=3, max_steps=3)
    other, _ = warm_started(kind, seed=4, max_steps=3)
    weights, same, different = (list(model.state_dict().values()) for model in (first, again, other))
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, different, strict=True))
    assert set(stages) == {"learn", "slip"}
    assert torch.get_num_threads() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def test_the_cache_is_filled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tiny_path("tiny-text")
    assert path.parent == tmp_path / "agentrl" and not path.exists()
    assert len({path, tiny_path("tiny-text", seed=2), tiny_path("tiny-vlm")}) == 3
    make_tiny("tiny-text", path, max_steps=0)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert cached_tiny("tiny-text") == path
    make_tiny("tiny-text", path, max_steps=0)
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp, "the first one to arrive stays"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing half-made is left"


def test_mistakes_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean tiny-vlm"):
        make_tiny("tiny-vl", tmp_path / "x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").touch()
    with pytest.raises(ConfigError, match="no model folder"):
        make_tiny("tiny-text", tmp_path / "taken", max_steps=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_start_lands_in_its_window(kind: str) -> None:
    """A first reply is right with this probability, so that an episode's mean reward lies below 0.6."""
    model, processor = warm_started(kind)
    shown = RECIPES[kind].demonstrator(processor).held_out(48)
    probability = exact_reply_probability(model, Collator(processor), shown)
    low, high = {"tiny-vlm": (0.12, 0.4), "tiny-text": (0.55, 0.8)}[kind]
    assert low < probability < high


def test_a_task_of_ones_own_is_played(processor: Any) -> None:
    env = lookup("env", "screenshot_math")()
    observation, _ = env.reset(seed=0, options={"task": Task("mine", row={"expression": "9+9"})})
    assert len(Renderer(processor).start(normalize(observation))) == 34
