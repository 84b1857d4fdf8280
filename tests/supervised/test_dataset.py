"""From files to examples: kinds of rows, what is cut, counted and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from agentrl import DataError, Image, Renderer
from agentrl.config import DpoConfig, RmConfig, SftConfig
from agentrl.image_store import ImageStore
from agentrl.reward_model import spell
from agentrl.supervised.dataset import load_examples
from agentrl.supervised.examples import Examples, Pair, rows_of
from agentrl.supervised.plan import make_plan
from agentrl.supervised.spelling import Speller

from ..core.templates import FAMILIES
from ..core.tokenizers import FakeProcessor

Load = Callable[..., Examples]
CONFIGS = {"sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}


@pytest.fixture
def renderer() -> Renderer:
    return Renderer(FakeProcessor(FAMILIES["vision"].tokenizer()))


@pytest.fixture
def load(tmp_path: Path, renderer: Renderer) -> Load:
    """load("sft", rows, data={…}, …): the examples of these rows, pictures in tmp_path/images."""

    def examples(kind: str, rows: list[dict[str, Any]], **sections: dict[str, Any]) -> Examples:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections["data"] = {"path": str(path)} | sections.get("data", {})
        config = CONFIGS[kind].model_validate(sections)
        return load_examples(config, renderer, ImageStore(tmp_path / "images"), lambda share: None)

    return examples


def said(renderer: Renderer, row: Any) -> str:
    return renderer.text(row.token_ids[row.loss_mask].tolist(), special=True)


def test_conversations_prompts_with_answers_and_foreign_keys(load: Load, renderer: Renderer) -> None:
    turns = [("user", "q"), ("assistant", "a")]
    whole = load("sft", [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    answered = load("sft", [{"p": "q", "a": "a"}], data={"input_key": "p", "answer_key": "a"})
    names = {"user": "human", "assistant": "gpt"}
    foreign = [{"conversations": [{"from": names[role], "value": text} for role, text in turns]}]
    other = load("sft", foreign, data={"input_key": "conversations"})
    rows = [examples.items[0] for examples in (whole, answered, other)]
    assert all(said(renderer, row) == "a<|im_end|>" for row in rows)
    assert all(np.array_equal(row.token_ids, rows[0].token_ids) for row in rows)


def test_answers_that_are_numbers_are_their_text(load: Load, renderer: Renderer) -> None:
    rows = [{"p": "q", "a": answer} for answer in (1, 0, -2.5, "1")]
    examples = load("sft", rows, data={"input_key": "p", "answer_key": "a"})
    assert [said(renderer, row) for row in examples.items] == [f"{text}<|im_end|>" for text in ("1", "0", "-2.5", "1")]
    (pair,) = load("dpo", [{"prompt": "q", "chosen": 1, "rejected": 2}]).items
    assert isinstance(pair, Pair) and [said(renderer, side) for side in pair.rows] == ["1<|im_end|>", "2<|im_end|>"]
    for answer in (True, None, float("nan")):
        with pytest.raises(DataError, match=r"row 0 of .*, neither a text"):
            load("sft", [{"p": "q", "a": answer}], data={"input_key": "p", "answer_key": "a"})


@pytest.mark.parametrize("weight", ["0", 0.5, 2, -1, "yes", [1]])
def test_a_weight_that_is_none_stops_with_its_row(load: Load, renderer: Renderer, weight: Any) -> None:
    """Before any model loads: what says so reads data alone."""

    def row(weights: tuple[Any, Any]) -> dict[str, Any]:
        said = [{"role": "assistant", "content": f"a{i}", "weight": weight} for i, weight in enumerate(weights)]
        return {"messages": [{"role": "user", "content": "q"}, said[0], {"role": "user", "content": "q"}, said[1]]}

    good = [row(weights) for weights in ((0, 1), (False, True), (0.0, 1.0), (0, None))]
    assert {said(renderer, item) for item in load("sft", good).items} == {"a1<|im_end|>"}
    with pytest.raises(DataError, match=r"row 4 of .*rows.jsonl: message 3: its weight is .*; it is 0 or 1"):
        load("sft", [*good, row((1, weight))])
    assert len(load("sft", [*good, row((1, weight))], data={"on_error": "skip"})) == 4
    side = row((1, weight))["messages"]
    with pytest.raises(DataError, match=r"row 0 of .*its weight"):
        load("dpo", [{"chosen": side, "rejected": good[0]["messages"]}], data={"input_key": "chosen"})


def test_a_template_stands_around_prompts_that_are_strings(load: Load, renderer: Renderer) -> None:
    data = {"template": "Q: {}!", "input_key": "p", "answer_key": "a"}
    (row,) = load("sft", [{"p": "q", "a": "a"}], data=data).items
    assert "Q: q!" in renderer.text(row.token_ids.tolist()) and said(renderer, row) == "a<|im_end|>"
    answer = [{"role": "assistant", "content": "b"}]
    pairs = load("rm", [{"prompt": "q", "chosen": "a", "rejected": answer}], data={"template": "Q: {}!"})
    assert isinstance(pairs.items[0], Pair)
    assert all(renderer.text(side.token_ids.tolist()).count("Q: q!") == 1 for side in pairs.items[0].rows)


def test_rows_without_an_answer_are_skipped_wherever_they_stand(load: Load) -> None:
    rows = [{"p": "q"}, {"p": "q", "a": "a"}]
    data = {"input_key": "p", "answer_key": "a"}
    assert [row.rollout_id for row in load("sft", rows, data={**data, "on_error": "skip"}).items] == ["row-1"]
    with pytest.raises(DataError, match=r"row 0 of .*there is no 'a' in it; it has p"):
        load("sft", rows, data=data)
    with pytest.raises(DataError, match=r"no column 'b' \(--data.answer-key\). It has: p, a"):
        load("sft", rows, data={**data, "answer_key": "b"})


def test_pictures_that_the_processor_refuses_are_skipped(load: Load, renderer: Renderer, tmp_path: Path) -> None:
    def pads(image: Any) -> int:
        if max(image.size) > 200 * min(image.size):
            raise ValueError("absolute aspect ratio")
        return 4

    renderer.expander._processor._pads = pads  # type: ignore[union-attr]
    for name, size in (("good", (3, 30)), ("thin", (3, 3000))):
        PILImage.new("RGB", size).save(tmp_path / f"{name}.png")
    rows = [{"p": "q", "a": "a", "i": name} for name in ("good.png", "thin.png")]
    data = {"input_key": "p", "answer_key": "a", "image_key": "i"}
    with pytest.raises(DataError, match=r"row 1 of .*no picture of 3x3000 pixels: absolute aspect ratio"):
        load("sft", rows, data=data)
    assert len(load("sft", rows, data={**data, "on_error": "skip"})) == 1


def test_TOK_06_rows_without_anything_to_train_are_left_out_and_counted(load: Load) -> None:
    rows = [{"p": "q", "a": "a"}, {"p": "q", "a": " "}, {"p": "q" * 80, "a": "a"}, {"p": "q", "a": "b" * 80}]
    examples = load("sft", rows, data={"input_key": "p", "answer_key": "a"}, train={"max_len": 64})
    assert [row.rollout_id for row in examples.items] == ["row-0", "row-3"]
    assert examples.left_out == {"nothing to train": 1, "longer than train.max_len": 1} and examples.cut == 1
    assert len(examples.items[1]) == 64 and examples.items[1].loss_mask[-1]
    assert "1 left out: nothing to train" in examples.describe("examples")
    with pytest.raises(DataError, match="no example is left to use \\(1 nothing to train\\)"):
        load("sft", rows[1:2], data={"input_key": "p", "answer_key": "a"})


def test_plain_text_is_trained_from_the_second_token_on_in_pieces(load: Load, renderer: Renderer) -> None:
    sections = {"data": {"input_key": "text"}, "sft": {"pretrain": True}, "train": {"max_len": 10}}
    examples = load("sft", [{"text": "<|im_end|>" + "é" * 9}, {"text": ""}, {"text": "b"}], **sections)
    assert examples.left_out == {"nothing to train": 1}
    assert all(not row.loss_mask[0] and row.loss_mask[1:].all() for row in examples.items)
    whole = [token for row in examples.items[:2] for token in row.token_ids.tolist()]
    assert [len(row) for row in examples.items[:2]] == [10, 10] and examples.cut == 1
    assert renderer.text(whole, special=True) == "<|im_end|>" + "é" * 9 + "<|im_end|>"


def test_pairs_in_every_form_train_the_answers_alone(load: Load, renderer: Renderer) -> None:
    user, early = {"role": "user", "content": "q"}, {"role": "assistant", "content": "earlier"}
    good, bad = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
    told = lambda who, text: {"from": who, "value": text}  # noqa: E731
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, {}),
        ({"prompt": [user], "chosen": [good], "rejected": [bad]}, {}),
        ({"chosen": [user, good], "rejected": [user, bad]}, {"input_key": "chosen"}),
        ({"prompt": "q", "chosen": [user, good], "rejected": [user, bad]}, {}),
        ({"prompt": [user, early, user], "chosen": "good", "rejected": "bad"}, {}),
        ({"chosen": [user, early, user, good], "rejected": [user, bad]}, {"input_key": "chosen"}),
        ({"prompt": "q", "chosen": [told("gpt", "good")], "rejected": [told("human", "q"), told("gpt", "bad")]}, {}),
    ]
    for row, data in forms:
        (pair,) = load("dpo", [row], data=data).items
        assert isinstance(pair, Pair) and pair.reference is None
        assert [said(renderer, side) for side in pair.rows] == ["good<|im_end|>", "bad<|im_end|>"]
    (scored,) = load("rm", [{**forms[0][0], "m": 2}], data={"margin_key": "m"}).items
    assert isinstance(scored, Pair) and scored.margin == 2.0
    assert [np.flatnonzero(side.loss_mask).tolist() for side in scored.rows] == [[len(r) - 1] for r in scored.rows]


@pytest.mark.parametrize("name", FAMILIES)
def test_TOK_03_a_reward_model_is_trained_on_the_ids_that_it_scores(tmp_path: Path, name: str) -> None:
    """Whatever a template puts before an answer, or strips off it."""
    renderer = Renderer(FAMILIES[name].tokenizer())
    answers = ["a2", " a2 ", "<think>\nhm\n</think>\n\na2", "x\n\ny\n"]
    rows = [{"prompt": "q1", "chosen": answer, "rejected": "other"} for answer in answers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RmConfig.model_validate({"data": {"path": str(tmp_path / "rows.jsonl")}})
    examples = load_examples(config, renderer, None, lambda share: None)
    for answer, item in zip(answers, examples.items, strict=True):
        assert isinstance(item, Pair)
        assert tuple(item.chosen.token_ids.tolist()) == spell(Speller(renderer), "q1", answer)


def test_pairs_that_are_too_long_or_say_nothing_are_left_out(load: Load) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": text} for text in ("b", "", "b" * 99)]
    examples = load("dpo", rows, train={"max_len": 64})
    assert len(examples) == 1 and examples.left_out == {"nothing to train": 1, "longer than train.max_len": 1}


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_an_answer_without_weight_makes_no_pair(load: Load, kind: str) -> None:
    silent = [{"role": "assistant", "content": "a", "weight": 0}]
    rows = [{"prompt": "q", "chosen": silent, "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    examples = load(kind, rows)
    assert len(examples) == 1 and examples.left_out == {"nothing to train": 1}


def test_a_last_turn_that_says_nothing_is_not_trained_in_place_of_others(load: Load, renderer: Renderer) -> None:
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", " ")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert [said(renderer, item) for item in load("sft", [row]).items] == ["a<|im_end|>"]
    full = {"messages": [*row["messages"][:3], {"role": "assistant", "content": "b"}]}
    examples = load("sft", [row, full], sft={"turns": "last"})
    assert [said(renderer, item) for item in examples.items] == ["b<|im_end|>"]
    assert examples.left_out == {"nothing to train": 1}


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_pairs_of_equal_answers_are_left_out(load: Load, kind: str) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": turns, "rejected": turns},
    ]
    examples = load(kind, rows)
    assert len(examples) == 1 and examples.left_out == {"chosen and rejected are the same": 2}
    with pytest.raises(DataError, match=r"no example is left to use \(2 chosen and rejected are the same\)"):
        load(kind, rows[1:])


def test_pictures_go_where_messages_leave_a_place_and_into_the_store(load: Load, tmp_path: Path) -> None:
    for color in ("red", "blue"):
        PILImage.new("RGB", (4, 4), color).save(tmp_path / f"{color}.png")
    shas = [Image(str(tmp_path / f"{color}.png")).sha256 for color in ("red", "blue")]
    hole = {"type": "image"}
    parts = [{"type": "text", "text": "and"}, hole, {"type": "text", "text": "then"}, hole]
    placed = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]}
    loose = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for row in (placed, loose):
        (item,) = load("sft", [{**row, "i": ["red.png", "blue.png"]}], data={"image_key": "i"}).items
        assert [sha for sha, _, _ in item.images] == shas
    assert all(ImageStore(tmp_path / "images").get(sha) for sha in shas)
    with pytest.raises(DataError, match=r"row 0 of .*: the messages have places for 2 of 3 images"):
        load("sft", [{**placed, "i": ["red.png"] * 3}], data={"image_key": "i"})
    with pytest.raises(DataError, match=r"places for more images than --data.image-key gives"):
        load("sft", [{**placed, "i": ["red.png"]}], data={"image_key": "i"})


def test_both_answers_of_a_pair_are_about_the_pictures_of_the_row(load: Load, tmp_path: Path) -> None:
    PILImage.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    sha = Image(str(tmp_path / "red.png")).sha256
    hole = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}
    good, bad = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
    for row, data in (
        ({"prompt": "q", "chosen": "good", "rejected": [bad]}, {}),
        ({"prompt": "q <image>", "chosen": "good", "rejected": [hole, bad]}, {}),
        ({"chosen": [hole, good], "rejected": [{"role": "user", "content": "q"}, bad]}, {"input_key": "chosen"}),
    ):
        (pair,) = load("dpo", [{**row, "i": "red.png"}], data={"image_key": "i", **data}).items
        assert isinstance(pair, Pair) and [[sha for sha, _, _ in side.images] for side in pair.rows] == [[sha]] * 2


def test_what_is_wrong_with_a_row_is_said_with_its_number(load: Load) -> None:
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "t": "[]"}
    with pytest.raises(DataError, match=r"no column 'x' \(--data.answer-key\). It has: messages, t"):
        load("sft", [good], data={"answer_key": "x"})
    with pytest.raises(DataError, match=r"row 1 of .*: the tools are no JSON"):
        load("sft", [good, {**good, "t": "{"}], data={"tools_key": "t"})
    skipping = load("sft", [good, {**good, "t": "{"}], data={"tools_key": "t", "on_error": "skip"})
    assert len(skipping) == 1 and skipping.left_out == {"unreadable": 1}
    assert "1 left out: unreadable" in skipping.describe("examples")
    with pytest.raises(DataError, match=r"--data.answer-key, or train on the text alone with --sft.pretrain"):
        load("sft", [{"messages": "text"}])
    with pytest.raises(DataError, match=r"row 0 of .*'m' is 'x', no margin"):
        load("rm", [{"prompt": "q", "chosen": "a", "rejected": "b", "m": "x"}], data={"margin_key": "m"})


def test_the_first_rows_of_each_dataset_are_used_and_each_is_named_when_it_is_bad(
    tmp_path: Path, renderer: Renderer
) -> None:
    def write(name: str, answers: list[Any]) -> str:
        rows = [{"p": name * 9, "a": answer} for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / f"{name}.jsonl")

    def examples(held_out: bool = False, data: dict[str, Any] | None = None, **sections: Any) -> list[str]:
        sections["data"] = {"input_key": "p", "answer_key": "a"} | (data or {})
        config = SftConfig.model_validate(sections)
        found = load_examples(config, renderer, None, lambda share: None, held_out=held_out)
        return [item.rollout_id for item in found.items]  # type: ignore[union-attr]

    paths = [write("one", ["a"] * 3), write("two", ["b"] * 3)]
    assert examples(data={"path": paths, "max_samples": 2}) == ["one/row-0", "one/row-1", "two/row-0", "two/row-1"]
    text = {"path": paths[0], "max_samples": 2, "answer_key": None}
    pieces = examples(data=text, sft={"pretrain": True}, train={"max_len": 16})
    assert {piece.rpartition("-")[0] for piece in pieces} == {"row-0", "row-1"}
    bad = write("bad", ["a", None])
    with pytest.raises(DataError, match=r"^row 1 of .*bad.jsonl: 'a' is None"):
        examples(held_out=True, data={"path": paths, "test_path": bad})
    with pytest.raises(DataError, match=r"^row 1 of .*bad.jsonl: 'a' is None"):
        examples(data={"path": [paths[0], bad]})


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_of_many_rows_each_is_spelled_when_its_turn_comes(
    load: Load, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the examples that the same rows give at once."""
    texts = ["a", "bb", " ", "cc", "d" * 80, "e"]
    rows = [{"prompt": f"q{i}", "a": text, "chosen": text, "rejected": "x"} for i, text in enumerate(texts)]
    data = {"input_key": "prompt"} | ({"answer_key": "a"} if kind == "sft" else {})
    options: dict[str, Any] = {"data": data, "train": {"max_len": 64}}
    whole = load(kind, rows, **options)
    monkeypatch.setattr("agentrl.supervised.dataset.AT_ONCE", 5)
    monkeypatch.setattr("agentrl.supervised.dataset.LOOKED_AT", 3)
    later = load(kind, rows, **options)
    assert len(later) == 6 and len(whole) == len(later.batch(range(6))) < 6
    assert "6 rows, spelled as their turn comes; of the first 3 rows: 2 " in later.describe("examples")
    assert "1 left out: nothing to train" in later.describe("examples")
    for one, other in zip(rows_of(whole.items), rows_of(later.batch(range(6))), strict=True):
        assert one.rollout_id == other.rollout_id and np.array_equal(one.token_ids, other.token_ids)
    assert later.batch([2]) == [] and [row.rollout_id for row in rows_of(later.batch([5, 0]))][-1].startswith("row-0")
    with pytest.raises(DataError, match=r"^row 5 of .*rows.jsonl: "):
        load(kind, [*rows[:5], {**rows[5], "a": None, "chosen": None}], **options).batch([0, 5])


def test_of_many_texts_memory_holds_none_and_the_pieces_are_those_of_few(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text} for text in ("short", "é" * 40, "a" * 15, "b" * 33, "x")]
    options: dict[str, Any] = {"data": {"input_key": "text"}, "train": {"max_len": 16}, "sft": {"pretrain": True}}
    whole = load("sft", rows, **options)
    monkeypatch.setattr("agentrl.supervised.dataset.AT_ONCE", 4)
    monkeypatch.setattr("agentrl.supervised.dataset.TEXTS_LOOKED_AT", 2)
    later = load("sft", rows, **options)
    assert len(later) == len(whole) == 11 and len(later.items) == 6
    assert "11 pieces, spelled as their turn comes; of the first 2 rows: 6 examples" in later.describe("examples")
    for one, other in zip(rows_of(whole.items), rows_of(later.batch(range(11))), strict=True):
        assert one.rollout_id == other.rollout_id and np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask) and not one.loss_mask[0]
    assert [row.rollout_id for row in rows_of(later.batch([10, 2]))] == ["row-4-0", "row-1-1"]


def test_CKP_02_the_horizon_is_the_number_of_updates() -> None:
    config = SftConfig.model_validate({"train": {"batch": 4, "epochs": 3}})
    plan = make_plan(config, 10, tiny=True)
    assert (plan.per_epoch, plan.steps) == (3, 9)
    for epoch in range(3):
        steps = range(3 * epoch + 1, 3 * epoch + 4)
        batches = [plan.indices(step) for step in steps]
        assert [len(batch) for batch in batches] == [4, 4, 2] and {plan.epoch(step) for step in steps} == {epoch}
        assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert plan.indices(1) != plan.indices(4) and plan.indices(2) == make_plan(config, 10, tiny=True).indices(2)
    still = config.model_copy(update={"train": config.train.model_copy(update={"shuffle": False, "steps": 4})})
    assert make_plan(still, 10, tiny=True).indices(4) == [0, 1, 2, 3] and make_plan(still, 10, tiny=True).steps == 4
