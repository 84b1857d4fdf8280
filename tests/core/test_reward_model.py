"""A reward model as a reward: in this process, in one of its own, and served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl import ConfigError, EnvError
from agentrl.assemble import make_reward
from agentrl.reward_model import RewardModel, RewardModelActor, _batches, conversation, scored_lists


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


PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1=?"}]


def test_scores_are_those_of_the_model_alone_or_together_and_normalised(folder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = RewardModel(str(folder))
    talks = [conversation(PROMPT, answer) for answer in ("2", "a long answer of many words", "")]
    together = model.score(talks)
    assert [model.score([talk])[0] for talk in talks] == pytest.approx(together, abs=1e-5)
    whole = AutoModelForSequenceClassification.from_pretrained(folder)
    for talk, score in zip(talks, together, strict=True):
        ids = torch.tensor([model._speller.spell(talk, last_only=True).token_ids])
        states = whole.model(input_ids=ids).last_hidden_state
        assert score == pytest.approx((float(whole.score(states)[0, -1, 0]) - 2.0) / 0.5, abs=1e-4)
    assert scored_lists(str(folder))([PROMPT, "q"], ["2", "x"])[0] == pytest.approx(together[0], abs=1e-5)


async def test_a_folder_is_a_reward_and_pictures_are_refused(folder: Path, tmp_path: Path) -> None:
    reward = make_reward(str(folder), None)
    score = await reward(prompt=PROMPT, completion="2", images=())
    assert score == pytest.approx(RewardModel(str(folder)).score([conversation(PROMPT, "2")])[0], abs=1e-5)
    with pytest.raises(EnvError, match="reads text"):
        await reward(prompt=PROMPT, completion="2", images=("picture",))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ConfigError, match="name the file and what it defines"):
        make_reward(str(tmp_path), None)


async def test_questions_that_come_together_are_answered_together_and_a_failure_is_told(folder: Path) -> None:
    actor = RewardModelActor(str(folder))
    alone = actor._model.score([conversation("q", "a")])[0]
    calls: list[int] = []
    score = actor._model.score

    def counted(talks):  # type: ignore[no-untyped-def]
        calls.append(len(talks))
        if any(talk[-1]["content"] == "bad" for talk in talks):
            raise RuntimeError("broken")
        return score(talks)

    actor._model.score = counted  # type: ignore[method-assign]
    answers = await asyncio.gather(*(actor.score([conversation("q", "a")]) for _ in range(20)))
    assert sum(calls) == 20 and len(calls) <= 3 and all(answer == pytest.approx([alone]) for answer in answers)
    with pytest.raises(RuntimeError, match="broken"):
        await actor.score([conversation("q", "bad")])
    assert await actor.score([conversation("q", "a")]) == pytest.approx([alone])


def test_batches_hold_like_lengths_within_the_budget() -> None:
    batches = _batches([10, 9000, 12, 9000, 20_000])
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert batches == [[0, 2], [1], [3], [4]]
