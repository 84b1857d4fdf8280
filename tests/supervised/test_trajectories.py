"""Recorded episodes as examples, and the best of several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import Renderer
from agentrl.assemble import load_processor
from agentrl.cli.main import run
from agentrl.cli.rollout import BestOf
from agentrl.config import SftConfig
from agentrl.image_store import ImageStore
from agentrl.rollout.episode import EpisodeResult
from agentrl.supervised.dataset import load_examples
from agentrl.supervised.examples import Examples

from ..core.templates import FAMILIES


def load(path: Path, renderer: Renderer, store: ImageStore, **sections: dict[str, Any]) -> Examples:
    sections["data"] = {"path": str(path)}
    return load_examples(SftConfig.model_validate(sections), renderer, store, lambda share: None)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentrl.trainers.tiny import make_tiny

    return Path(make_tiny("tiny-vlm", tmp_path_factory.mktemp("models") / "tiny-vlm", max_steps=0))


def test_episodes_with_pictures_are_trained_in_the_tokens_that_were_sampled(vlm: Path, tmp_path: Path) -> None:
    """Several turns of random tokens about a picture; then as the rollouts/ of a run."""
    played = tmp_path / "played" / "out.jsonl"
    command = ["rollout", "--env", "screenshot_math", "--engine", "random", "--model", str(vlm), "-n", "3"]
    assert run([*command, "--out", str(played), "--rollout.max-new-tokens", "8"]) == 0
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


def result(draw: int, sample: int, reward: float | None) -> EpisodeResult:
    return EpisodeResult(f"{draw}-{sample}", f"{draw}", draw, sample, "t", "env", total_reward=reward)


def test_the_best_of_a_group_is_the_first_with_the_highest_reward() -> None:
    best = BestOf(3)
    rewards = {(0, 1): 1.0, (1, 0): None, (0, 2): 1.0, (1, 1): None, (0, 0): 0.5, (1, 2): None, (2, 0): -2.0}
    kept = [best.kept(result(draw, sample, reward)) for (draw, sample), reward in rewards.items()]
    assert [[one.rollout_id for one in some] for some in kept if some] == [["0-1"]]
    assert best.kept(result(2, 1, None)) == []
    assert [one.rollout_id for one in best.kept(result(2, 2, -1.0))] == ["2-2"]


def test_text_of_another_model_is_spelled_anew(tmp_path: Path) -> None:
    """The recorded ids are of a vocabulary in which they say something else."""
    ids = [3, 4, 5, 6]
    row = {"token_ids": ids, "loss_mask": [0, 0, 1, 1], "logprobs": [0.0] * 4, "versions": [-1, -1, 0, 0]}
    row |= {"rewards": [0.0] * 4, "images": [], "advantage": None}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]
    about = {"group_id": "g", "draw": 0, "sample": 0, "task_id": "t", "env": "e", "step": 0, "turns": 1, "metrics": {}}
    about |= {"score": 1.0, "truncated": False, "finish_reason": "stop", "outcome": "played"}
    record = {"rollout_id": "r", **about, "rows": [row], "messages": messages, "total_reward": 1.0, "error": None}
    failed = {**record, "rollout_id": "f", "rows": [], "error": {"class": "EnvError", "message": "x"}}
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (record, {**record, "score": 0.0}, failed))
    )
    renderer = Renderer(FAMILIES["chatml"].tokenizer())
    examples = load(tmp_path / "a.jsonl", renderer, ImageStore(tmp_path / "images"), sft={"min_score": 0.5})
    (item,) = examples.items
    trained = item.token_ids[item.loss_mask]  # type: ignore[union-attr]
    assert renderer.text(trained.tolist(), special=True) == "the answer<|im_end|>"
    assert examples.left_out == {"failed": 1, "score below sft.min_score": 1}
    assert np.array_equal(
        item.token_ids, Renderer(FAMILIES["chatml"].tokenizer()).start(messages[:1]).token_ids + tuple(trained)
    )  # type: ignore[union-attr]
