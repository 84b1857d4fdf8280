"""Recorded episodes as examples, and the best of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import ConfigError, DataError, Renderer
from agentrl.assemble import load_processor
from agentrl.cli.main import run
from agentrl.cli.rollout import BestOf
from agentrl.config import SftConfig
from agentrl.image_store import ImageStore
from agentrl.rollout.episode import EpisodeResult
from agentrl.supervised.dataset import load_examples
from agentrl.supervised.examples import Examples

from ..core.templates import FAMILIES, TOOL


def load(path: Path, renderer: Renderer, store: ImageStore, **sections: dict[str, Any]) -> Examples:
    sections["data"] = {"path": str(path)}
    return load_examples(SftConfig.model_validate(sections), renderer, store, lambda share: None)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentrl.trainers.tiny import make_tiny

    return Path(make_tiny("tiny-vlm", tmp_path_factory.mktemp("models") / "tiny-vlm", max_steps=0))


def test_episodes_with_pictures_are_trained_in_the_tokens_that_were_sampled(
    vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns of random tokens about a picture; then as the rollouts/ of a run."""
    played = tmp_path / "played" / "out.jsonl"
    command = ["rollout", "--env", "screenshot_math", "--engine", "random", "--model", str(vlm), "-n", "3"]
    assert run([*command, "--out", str(played), "--rollout.max-new-tokens", "8"]) == 0
    monkeypatch.setattr("agentrl.cli.policy.tiny_policy", {"tiny-vlm": str(vlm)}.__getitem__)
    assert run(["sft", "--data.path", str(played), "--dry-run"]) == 0, "without --model one that sees"
    records = [json.loads(line) for line in played.read_text().splitlines()]
    renderer, store = Renderer(load_processor(str(vlm), False)), ImageStore(tmp_path / "store")
    examples = load(played, renderer, store)
    rows = [row for record in records for row in record["rows"]]
    assert len(examples) == len(rows) and all(item.images for item in examples.items)  # type: ignore[union-attr]
    for item, row in zip(examples.items, rows, strict=True):
        last = max(i for i, trained in enumerate(row["loss_mask"]) if trained) + 1
        assert item.token_ids.tolist() == row["token_ids"][:last]  # type: ignore[union-attr]
        assert item.loss_mask.tolist() == [bool(i) for i in row["loss_mask"][:last]]  # type: ignore[union-attr]
        assert all(store.get(sha) for sha, _, _ in item.images)  # type: ignore[union-attr]
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (played.parent / "images").rename(tmp_path / "run" / "images")
    played.rename(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    assert load(tmp_path / "run" / "rollouts", renderer, store, train={"max_len": 60}).cut == 3
    for item in load(tmp_path / "run" / "rollouts", renderer, store, sft={"turns": "last"}).items:
        assert np.diff(np.flatnonzero(item.loss_mask)).max() == 1 and item.loss_mask.sum() <= 8  # type: ignore[union-attr]
    good = load(tmp_path / "run" / "rollouts", renderer, store, sft={"min_score": -1.0})
    assert len(good) == len(examples)
    first, second = records[:2]
    del first["turns"], first["tools"]
    file = tmp_path / "run" / "rollouts" / "step_000001.jsonl"
    for broken in ({**second, "rows": [{}]}, {**second, "rows": 7}, 7):
        file.write_text(json.dumps(first) + "\n" + json.dumps(broken) + "\n")
        with pytest.raises(DataError, match=r"step_000001\.jsonl, line 2 is no record of an episode"):
            load(file, renderer, store)


def result(draw: int, sample: int, reward: float | None) -> EpisodeResult:
    return EpisodeResult(f"{draw}-{sample}", f"{draw}", draw, sample, "t", "env", total_reward=reward)


def test_the_best_of_a_group_is_the_first_with_the_highest_reward() -> None:
    best = BestOf(3)
    rewards = {(0, 1): 1.0, (1, 0): None, (0, 2): 1.0, (1, 1): None, (0, 0): 0.5, (1, 2): None, (2, 0): -2.0}
    kept = [best.kept(result(draw, sample, reward)) for (draw, sample), reward in rewards.items()]
    assert [[one.rollout_id for one in some] for some in kept if some] == [["0-1"]]
    assert best.kept(result(2, 1, None)) == []
    assert [one.rollout_id for one in best.kept(result(2, 2, -1.0))] == ["2-2"]


def recorded(name: str, ids: list[int], trained: int, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """An episode of one row whose last `trained` ids were sampled."""
    count = len(ids)
    row = {"token_ids": ids, "loss_mask": [0] * (count - trained) + [1] * trained, "logprobs": [0.0] * count}
    row |= {"versions": [0] * count, "rewards": [0.0] * count, "images": [], "advantage": None}
    about = {"group_id": "g", "draw": 0, "sample": 0, "task_id": "t", "env": "e", "step": 0, "turns": 1, "metrics": {}}
    about |= {"score": 1.0, "truncated": False, "finish_reason": "stop", "outcome": "played", "error": None}
    return {"rollout_id": name, **about, "rows": [row], "messages": messages, "total_reward": 1.0, **more}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


FOREIGN = [3, 4, 5, 6]
"""Ids that say something else in the tests' vocabulary."""
ASKED: dict[str, Any] = {"role": "user", "content": "q"}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "the answer"}


def test_each_episode_of_another_model_is_spelled_anew(tmp_path: Path) -> None:
    """Beside this model's own, in any order; also one whose last word is a call; with the tools that it was shown."""
    renderer = Renderer(FAMILIES["chatml"].tokenizer())
    prompt = list(renderer.start([ASKED]).token_ids)
    reply = [*renderer.tokenizer("the answer").input_ids, renderer.tokenizer.eos_token_id]
    own = recorded("own", prompt + reply, len(reply), [ASKED, ANSWERED])
    other = recorded("other", FOREIGN, 2, [ASKED, ANSWERED], tools=[TOOL])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = recorded("calling", FOREIGN, 2, [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}])
    for number, records in enumerate(([*[own] * 8, other, calling], [calling, other, *[own] * 8])):
        examples = load(write(tmp_path / f"{number}.jsonl", *records), renderer, ImageStore(tmp_path / "images"))
        assert examples.respelled == 2 and "2 of another model, spelled anew" in examples.describe("examples")
        texts = {item.rollout_id: renderer.text(item.token_ids.tolist(), special=True) for item in examples.items}  # type: ignore[union-attr]
        assert texts["own-0"].endswith("the answer<|im_end|>") and "Adds." not in texts["own-0"]
        assert texts["other-0"].endswith("the answer<|im_end|>") and "Adds." in texts["other-0"]
        assert '"add"' in texts["calling-0"]
        for item in examples.items:
            assert item.token_ids.tolist() == prompt + reply or item.rollout_id != "own-0"  # type: ignore[union-attr]


def test_text_of_another_model_is_spelled_anew(tmp_path: Path) -> None:
    record = recorded("r", FOREIGN, 2, [ASKED, ANSWERED])
    failed = {**record, "rollout_id": "f", "rows": [], "error": {"class": "EnvError", "message": "x"}}
    path = write(tmp_path / "a.jsonl", record, {**record, "score": 0.0}, failed)
    renderer = Renderer(FAMILIES["chatml"].tokenizer())
    examples = load(path, renderer, ImageStore(tmp_path / "images"), sft={"min_score": 0.5})
    (item,) = examples.items
    trained = item.token_ids[item.loss_mask]  # type: ignore[union-attr]
    assert renderer.text(trained.tolist(), special=True) == "the answer<|im_end|>"
    assert examples.left_out == {"failed": 1, "score below sft.min_score": 1}
    assert np.array_equal(item.token_ids, renderer.start([ASKED]).token_ids + tuple(trained))  # type: ignore[union-attr]


def test_recorded_episodes_stand_alone_and_have_options_of_their_own(tmp_path: Path) -> None:
    """Beside other data they would be read as conversations, whatever they scored."""
    episodes = str(write(tmp_path / "rec.jsonl", *[recorded(f"r{i}", FOREIGN, 2, [ASKED, ANSWERED]) for i in range(3)]))
    chats = str(write(tmp_path / "chats.jsonl", {"messages": [ASKED, ANSWERED]}))
    renderer, store = Renderer(FAMILIES["chatml"].tokenizer()), ImageStore(tmp_path / "images")

    def refused(**sections: Any) -> str:
        with pytest.raises(ConfigError) as error:
            load_examples(SftConfig.model_validate(sections), renderer, store, lambda share: None)
        return str(error.value)

    assert "rec.jsonl holds recorded episodes and" in refused(data={"path": [episodes, chats]})
    assert "--sft.min-score is not used without" in refused(data={"path": chats}, sft={"min_score": 1})
    assert "--sft.pretrain is not used with" in refused(data={"path": episodes}, sft={"pretrain": True})
    assert "--data.probs is not used with" in refused(data={"path": [episodes] * 2, "probs": [1, 1]})
    assert "--data.answer-key is not used with" in refused(data={"path": episodes, "answer_key": "a"})
    mixed = {"path": [episodes, episodes], "test_path": [chats], "max_samples": 2, "on_error": "skip"}
    config = SftConfig.model_validate({"data": mixed, "sft": {"min_score": 1}})
    found = [
        load_examples(config, renderer, store, lambda share: None, held_out=held_out) for held_out in (False, True)
    ]
    assert [[item.rollout_id for item in one.items] for one in found] == [["r0-0", "r1-0"] * 2, ["row-0"]]  # type: ignore[union-attr]
