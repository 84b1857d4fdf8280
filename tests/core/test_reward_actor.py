"""A reward model's folder as a reward: normalised, batched, refusing pictures."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl import ConfigError, EnvError
from agentrl.assemble import make_executor, make_reward
from agentrl.config import Config
from agentrl.reward_actor import RewardModelActor

PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1=?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a head of one output, its end of turn also its padding, mean 2 and deviation 0.5."""
    from agentrl.torchvision_ops import ensure_torchvision_imports

    ensure_torchvision_imports()
    import torch
    from transformers import Qwen3ForSequenceClassification

    from ..engines import tiny

    path = tmp_path_factory.mktemp("rm")
    config = tiny.text_model(path, tied=False).config
    config.num_labels, config.pad_token_id = 1, config.eos_token_id
    config.mean, config.std = 2.0, 0.5
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    return path


def score_of(folder: Path, text: str) -> float:
    """Of a conversation as the template writes it, read at its end-of-turn token, by the definition."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [*PROMPT, {"role": "assistant", "content": text}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
    ids = tokenizer(shown, add_special_tokens=False, return_tensors="pt").input_ids
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        raw = model.score(model.model(input_ids=ids).last_hidden_state)[0, -1, 0].item()
    return (raw - 2.0) / 0.5


async def test_a_folder_is_a_reward_normalised_and_read_at_the_end_of_the_turn(folder: Path, tmp_path: Path) -> None:
    reward = make_reward(str(folder), None)
    answers = ["2", "a longer answer", ""]
    scores = await asyncio.gather(*(reward(prompt=PROMPT, completion=answer, images=()) for answer in answers))
    expected = [score_of(folder, answer) for answer in answers]
    assert scores == pytest.approx(expected, abs=1e-4)
    raw = make_reward(str(folder), None, normalize=False)
    as_they_are = await asyncio.gather(*(raw(prompt=PROMPT, completion=answer, images=()) for answer in answers))
    assert as_they_are == pytest.approx([0.5 * score + 2.0 for score in expected], abs=1e-4)
    with pytest.raises(EnvError, match="reads text"):
        await reward(prompt=PROMPT, completion="2", images=("picture",))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"is no reward model: its config names no"):
        make_reward(str(tmp_path), None)


def test_raw_scores_are_asked_of_a_reward_model_alone() -> None:
    config = Config.model_validate(
        {"data": {"path": "d.jsonl"}, "reward": {"name": ["http://127.0.0.1:1"], "normalize": False}}
    )
    with pytest.raises(ConfigError, match=r"--reward.no-normalize is not used without a --reward that is the folder"):
        make_executor(config)


def test_what_is_neither_a_model_nor_a_function_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--reward {tmp_path}: .* no config.json, so it is no reward model"):
        make_reward(str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"--reward nowhere: there is no such folder .*path/to/file.py:name"):
        make_reward("nowhere", None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        make_reward(str(tmp_path), None)


async def test_questions_that_come_together_are_answered_together_and_a_failure_is_told(folder: Path) -> None:
    actor = RewardModelActor(str(folder))
    alone = await actor.score(PROMPT, "a")
    model, calls = actor.model, []

    def counted(prompts: Any, completions: Any, *more: Any) -> list[float]:
        calls.append(len(completions))
        if "bad" in completions:
            raise RuntimeError("broken")
        return model(prompts, completions, *more)

    actor.model = counted
    answers = await asyncio.gather(*(actor.score(PROMPT, "a") for _ in range(20)))
    assert sum(calls) == 20 and len(calls) <= 3 and answers == pytest.approx([alone] * 20, abs=1e-5)
    gone, waiting = [asyncio.ensure_future(actor.score(PROMPT, "bad")) for _ in range(2)]
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(waiting, 20)
    assert math.isfinite(await actor.score(PROMPT, "a"))
