"""Datasets of prompts: what reaches a task, and what is said about rows that are none."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from agentrl import DataError
from agentrl.assemble import make_tasks
from agentrl.config import Config, DataSection
from agentrl.data import load_tasks, row_task


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("label", [7, "7", ["7"], 2**55 + 1, {"a": 1, "b": [0.5]}, None, True, 0.25])
def test_labels_keep_their_type(tmp_path: Path, label: Any) -> None:
    path = write(tmp_path, [{"input": "a", "label": label}])
    (task,) = load_tasks(DataSection(path=path, label_key="label"), evaluation=False)
    assert task.label == label and type(task.label) is type(label)


def test_a_bad_row_is_named_before_anything_else_happens(tmp_path: Path) -> None:
    path = write(tmp_path, [{"input": "a"}, {"input": "b"}, {"input": None}])
    with pytest.raises(DataError, match=r"row 2 of .*'input' is None"):
        load_tasks(DataSection(path=path), evaluation=False)
    assert len(load_tasks(DataSection(path=path, max_samples=2), evaluation=False)) == 2
    kept = load_tasks(DataSection(path=path, on_error="skip"), evaluation=False)
    assert [task.id for task in kept] == ["row-0", "row-1"]


def test_a_missing_column_lists_those_found(tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": "a", "answer": 1}])
    with pytest.raises(DataError, match=r"no column 'input' \(--data.input-key\). It has: question, answer"):
        load_tasks(DataSection(path=path), evaluation=False)


def test_pictures_in_every_form(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture = PILImage.new("RGB", (3, 2), "red")
    picture.save(buffer, "PNG")
    png = buffer.getvalue()
    (tmp_path / "red.png").write_bytes(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    section = DataSection(path=str(tmp_path / "data.jsonl"), image_key="image")
    forms = ["red.png", str(tmp_path / "red.png"), png, {"bytes": png, "path": None}, {"path": "red.png"}, url, picture]
    tasks = [row_task(0, {"input": "a", "image": form}, section) for form in [*forms, forms]]
    hashes = {image.sha256 for task in tasks for image in task.images}
    assert len(hashes) == 1 and len(tasks[-1].images) == len(forms)


@pytest.mark.parametrize("form", ["http://host/red.png", "nowhere.png", b"no picture", 3])
def test_a_picture_that_is_none_names_its_row(tmp_path: Path, form: Any) -> None:
    section = DataSection(path=str(tmp_path / "data.jsonl"), image_key="image")
    with pytest.raises(DataError, match="row 5 of"):
        row_task(5, {"input": "a", "image": form}, section)


def test_a_split_of_another_name_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.data._read", lambda section: Rows(f"{section.path} {section.split}"))
    config = Config.model_validate({"data": {"path": "corpus", "split": "train_sft", "test_path": "held_out"}})
    assert make_tasks(config, "train")[0].prompt == "corpus train_sft"
    assert make_tasks(config, "test")[0].prompt == "held_out train_sft"


class Rows(list[dict[str, str]]):
    """A dataset of one row that says where it is from."""

    column_names = ("input",)

    def __init__(self, said: str) -> None:
        super().__init__([{"input": said}])
