"""Faults that users of such frameworks reported, of data: each named check of DAT-01, DAT-03 and DAT-04."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import DataError, Reply, ScriptedEngine, SingleTurnExecutor, Task, run_episode
from agentrl.assemble import load_processor
from agentrl.config import DataSection
from agentrl.data import load_tasks, row_task
from agentrl.data.lengths import fits
from agentrl.renderer import Renderer
from agentrl.single_turn import opening

LABELS = [7, "7", ["7", "seven"], 2**55 + 1, {"a": 1}, None]


def test_dat_01_one_picture_in_six_forms(tmp_path: Path, forms: dict[str, Any]) -> None:
    section = DataSection(path=str(tmp_path / "data.jsonl"), image_key="image")
    tasks = [row_task(i, {"input": "a", "image": form}, section) for i, form in enumerate(forms.values())]
    arrays = [np.asarray(task.images[0].pil) for task in tasks]
    assert len(arrays) == 6 and all(np.array_equal(arrays[0], array) for array in arrays)
    together = row_task(0, {"input": "a", "image": list(forms.values())}, section)
    assert len(together.images) == 6 and len({image.sha256 for image in together.images}) == 1


def test_dat_01_one_bad_path_of_six_is_skipped_and_counted(
    lines: Callable[..., str], forms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "a", "image": "nowhere.png" if i == 4 else forms["relative"]} for i in range(6)]
    path = lines(rows)
    tasks = load_tasks(DataSection(path=path, image_key="image", on_error="skip"), evaluation=False)
    assert len(tasks) == 5 and "1 of 6 rows skipped: row 4" in caplog.text
    with pytest.raises(DataError, match=r"row 4 of .*nowhere\.png"):
        load_tasks(DataSection(path=path, image_key="image"), evaluation=False)


def test_dat_01_all_bad_stops_before_a_model_loads(
    lines: Callable[..., str], agentrl: Callable[..., Any], write: Callable[..., str]
) -> None:
    path = lines({"input": "a", "label": 1, "image": f"{i}.png"} for i in range(3))
    write("r.py", "def f(completion): return 0.0")
    said = agentrl(
        *("train", "--data.path", path, "--data.image-key", "image", "--data.on-error", "skip"),
        *("--reward", "r.py:f", "--model", "no-model"),
    )
    assert said.code == 2 and "no row is left to use" in said.err and "no-model" not in said.err


class Pictures(Renderer):
    """Counts one token a word, four an image, and cannot take the word BROKEN."""

    def __init__(self) -> None:
        pass

    def start(self, messages: Any, tools: Any = ()) -> Any:
        parts = [part for m in messages for part in ([m["content"]] if isinstance(m["content"], str) else m["content"])]
        words = [word for part in parts if isinstance(part, str) for word in part.split()]
        if "BROKEN" in words:
            raise DataError("the processor raised")
        return range(len(words) + 4 * sum(not isinstance(part, str) for part in parts) + len(tools))

    def exceeds(self, messages: Any, tokens: int) -> bool:
        return False


def test_dat_03_length_is_counted_with_images_tools_and_system_text(
    lines: Callable[..., str], forms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    words, system = "w w w w w", [{"role": "system", "content": "s s s s s s"}]
    rows = [
        {"input": words, "image": "red.png", "tools": []},  # 5 + 4: kept
        {"input": words + " w w", "image": "red.png", "tools": []},  # 7 + 4: dropped
        {"input": words + " w", "image": "red.png", "tools": [{"type": "function"}]},  # 6 + 4 + 1: dropped
        {"input": [*system, {"role": "user", "content": words}], "image": [], "tools": []},  # 6 + 5: dropped
        {"input": words + " w w w", "image": [], "tools": []},  # 8: kept
    ]
    section = DataSection(path=lines(rows), image_key="image", tools_key="tools")
    kept = load_tasks(section, evaluation=False).keep(fits(Pictures(), 10), "longer than 10 tokens")
    assert [task.id for task in kept] == ["row-0", "row-4"]
    assert "3 of 5 rows are longer than 10 tokens and are left out: row 1, row 2, row 3" in caplog.text


def test_dat_03_a_row_that_cannot_be_rendered_is_named(
    lines: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "fine"}, {"input": "BROKEN " + "w " * 40}]
    with pytest.raises(DataError, match=r"row 1 of .*the processor raised"):
        load_tasks(DataSection(path=lines(rows)), evaluation=False).keep(fits(Pictures(), 10), "long")
    kept = load_tasks(DataSection(path=lines(rows), on_error="skip"), evaluation=False)
    assert len(kept.keep(fits(Pictures(), 10), "long")) == 1
    assert "1 of 2 rows cannot be read and are left out: row 1" in caplog.text
    with pytest.raises(DataError, match="no row is left to use, all 2 are"):
        load_tasks(DataSection(path=lines(rows), on_error="skip"), evaluation=False).keep(lambda task: False, "long")


def test_dat_04_a_missing_label_column_names_the_wanted_and_the_found(
    lines: Callable[..., str], agentrl: Callable[..., Any], write: Callable[..., str]
) -> None:
    path = lines([{"question": "a", "answer": 1}])
    write("r.py", "def f(completion): return 0.0")
    said = agentrl(
        *("train", "--data.path", path, "--data.input-key", "question", "--data.label-key", "label"),
        *("--reward", "r.py:f"),
    )
    assert said.code == 2
    assert "no column 'label' (--data.label-key). It has: question, answer." in said.err


@pytest.mark.parametrize("label", LABELS, ids=repr)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json", "arrow", "disk"])
async def test_dat_04_labels_reach_the_reward_with_value_and_type(
    kind: str, label: Any, lines: Callable[..., str], stored: Callable[..., str], models: Callable[[str], str]
) -> None:
    rows = [{"input": "a", "label": label}, {"input": "b", "label": label}]
    path = lines(rows) if kind == "jsonl" else stored(kind, rows)
    seen: list[Any] = []

    def record(label: Any, row: Any) -> float:
        seen.extend([label, row["label"]])
        return 1.0

    renderer = Renderer(load_processor(models("tiny-text"), False))
    for task in load_tasks(DataSection(path=path, label_key="label"), evaluation=False):
        ended = await run_episode(SingleTurnExecutor(record), ScriptedEngine([Reply([1, 2])]), renderer, task)
        assert ended.error is None and ended.total_reward == 1.0
    assert seen == [label] * 4 and all(type(got) is type(label) for got in seen)


def test_dat_04_labels_of_different_types_in_one_file(lines: Callable[..., str]) -> None:
    path = lines({"input": "a", "label": label} for label in LABELS)
    labels = [task.label for task in load_tasks(DataSection(path=path, label_key="label"), evaluation=False)]
    assert labels == LABELS and [type(label) for label in labels] == [type(label) for label in LABELS]


def test_dat_04_a_string_and_one_user_message_are_the_same_prompt(
    lines: Callable[..., str], models: Callable[[str], str]
) -> None:
    renderer = Renderer(load_processor(models("tiny-text"), False))
    path = lines([{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}])
    one, two = (
        renderer.start(opening(task)).token_ids for task in load_tasks(DataSection(path=path), evaluation=False)
    )
    assert one == two and len(one) > 2


def test_dat_04_text_survives_to_the_byte(lines: Callable[..., str]) -> None:
    text = "你好 🎈 line\u2028separator\u2029 nel\x85 \r\n tab\t é e\u0301 \ufeff"
    path = lines([{"input": text}, json.dumps({"input": text}, ensure_ascii=True)])
    tasks: list[Task] = list(load_tasks(DataSection(path=path), evaluation=False))
    assert [task.prompt for task in tasks] == [text, text]
