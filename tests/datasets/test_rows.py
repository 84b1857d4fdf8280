"""What rows may be stored in."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import DataError
from agentrl.config import DataSection
from agentrl.data import load_tasks, open_rows

from .hub import serving

ROWS = [{"input": "1+1", "label": 2}, {"input": "2+2", "label": 4}]


@pytest.mark.parametrize("kind", ["parquet", "json", "arrow", "disk", "dict", "folder"])
def test_every_store_gives_the_same_rows(kind: str, stored: Callable[..., str]) -> None:
    rows = open_rows(stored(kind, ROWS))
    assert rows.columns == ["input", "label"] and len(rows) == 2
    assert [row for _, row in rows.scan()] == ROWS == [rows.row(0), rows.row(1)]


def test_the_splits_of_a_disk_format_and_of_a_folder(stored: Callable[..., str], tmp_path: Path) -> None:
    path = stored("dict", ROWS)
    assert len(open_rows(path, "test")) == 1
    with pytest.raises(DataError, match=r"has no split 'valid'. It has: train, test"):
        open_rows(path, "valid")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"input": "a", "label": 1}\n{"input": "b", "label": "1"}\n')
    (folder / "test.jsonl").write_text('{"input": "c"}\n')
    config = {"path": str(folder), "test_path": str(folder), "test_split": "test"}
    assert [t.row.get("label") for t in load_tasks(DataSection.model_validate(config), evaluation=False)] == [1, "1"]
    assert [t.prompt for t in load_tasks(DataSection.model_validate(config), evaluation=True)] == ["c"]


def test_cells_of_a_csv_are_strings(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("input,label\n007,NA\n1.50,\n")
    assert [row for _, row in open_rows(str(tmp_path / "data.csv")).scan()] == [
        {"input": "007", "label": "NA"},
        {"input": "1.50", "label": ""},
    ]


def bad_rows(path: Path) -> dict[int, str]:
    return {number: str(row) for number, row in open_rows(str(path)).scan() if isinstance(row, DataError)}


def prompts(path: Path) -> list[Any]:
    return [task.prompt for task in load_tasks(DataSection(path=str(path), on_error="skip"), evaluation=False)]


@pytest.mark.parametrize("header", ["input,y", "input,y,", "\n\ufeffinput,y,,"])
def test_empty_cells_at_the_end_of_csv_rows_are_nothing(header: str, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(header.replace("\n\ufeff", "\ufeff\n") + "\na,1,\n\n  \nb,2,,\nc\n")
    rows = [row for _, row in open_rows(str(tmp_path / "data.csv")).scan()]
    assert rows == [{"input": "a", "y": "1"}, {"input": "b", "y": "2"}, {"input": "c", "y": ""}]
    tasks = load_tasks(DataSection(path=str(tmp_path / "data.csv"), image_key="y", check_images=0), evaluation=False)
    assert tasks[2].images == (), "an empty cell is no picture"


@pytest.mark.parametrize("folder", [False, True])
def test_cells_without_a_column_make_a_bad_row(folder: bool, tmp_path: Path) -> None:
    place = tmp_path / "train" if folder else tmp_path
    place.mkdir(exist_ok=True)
    (place / "train.csv").write_text('input,y\na,1\n\n"b\nb",2,3\nc,4\n')
    path = place if folder else place / "train.csv"
    with pytest.raises(DataError, match=r"row 1 of .*: it has 3 cells, and the header names 2 columns"):
        load_tasks(DataSection(path=str(path)), evaluation=False)
    assert prompts(path) == ["a", "c"] and list(bad_rows(path)) == [1]
    with pytest.raises(DataError, match="row 1 of"):
        open_rows(str(path)).row(1)


@pytest.mark.parametrize("name", ["a[1].jsonl", "[b].csv", "c?*.parquet", "ü [x]/train.jsonl", "d[0]/train.csv"])
def test_names_are_no_patterns(name: str, tmp_path: Path) -> None:
    import datasets

    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "a1.jsonl").write_text('{"input": "other"}\n')
    if path.suffix == ".parquet":
        datasets.Dataset.from_list([{"input": "x"}]).to_parquet(path)
    else:
        path.write_text("input\nx\n" if path.suffix == ".csv" else '{"input": "x"}\n')
    assert prompts(path) == ["x"]
    if path.parent != tmp_path:
        assert prompts(path.parent) == ["x"]


def test_a_folder_with_pictures_beside_its_rows(tmp_path: Path, forms: dict[str, Any]) -> None:
    """Rows keep their types; what is in a folder of pictures with a description is read by `datasets`."""
    folder = tmp_path / "corpus"
    (folder / "images").mkdir(parents=True)
    for i in range(3):
        (folder / "images" / f"{i}.png").write_bytes(forms["bytes"])
    rows = [{"input": "a", "image": "images/0.png", "label": 7}, {"input": "b", "image": "images/1.png", "label": "7"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks(DataSection(path=str(folder), image_key="image", label_key="label"), evaluation=False)
    assert [task.label for task in tasks] == [7, "7"] and tasks[1].images[0].size == (2, 2)
    (folder / "data.jsonl").rename(folder / "data.json")
    (folder / "data.json").write_text(json.dumps(rows))
    tasks = load_tasks(DataSection(path=str(folder), image_key="image", label_key="label"), evaluation=False)
    assert [task.label for task in tasks] == [7, "7"]
    (folder / "more.csv").write_text("input,image,label\nc,images/2.png,7\n")
    with pytest.raises(DataError, match=r"has files of several kinds \(.csv, .json\): give those of one kind"):
        open_rows(str(folder))
    described = tmp_path / "described"
    (folder / "images").rename(described)
    (described / "metadata.jsonl").write_text('{"file_name": "0.png", "input": "a"}\n')
    assert set(open_rows(str(described)).columns) == {"image", "input"}


def test_a_copy_of_a_dataset_of_the_hub_has_the_files_that_its_card_names(tmp_path: Path) -> None:
    for part, label in (("easy", 1), ("hard", "2")):
        (tmp_path / "copy" / part).mkdir(parents=True)
        (tmp_path / "copy" / part / "train.jsonl").write_text(f'{{"label": 0}}\n{json.dumps({"label": label})}\n')
    configs = "".join(f"- config_name: {part}\n  data_files: {part}/*.jsonl\n" for part in ("easy", "hard"))
    card = tmp_path / "copy" / "README.md"
    card.write_text(f"---\nconfigs:\n{configs}---\n# Sums\n---\n")
    copy = str(tmp_path / "copy")
    assert [row for _, row in open_rows(f"{copy}@hard").scan()] == [{"label": 0}, {"label": "2"}]
    assert open_rows(f"{copy}@hard").folder == tmp_path / "copy"
    with pytest.raises(DataError, match=r"(?s)available configs: \['easy', 'hard'\]"):
        open_rows(copy)
    for text in ("# Sums\n", "---\nlicense: mit\n---\n", "---\n: [\n---\n", "---\n"):
        card.write_text(text)
        assert len(open_rows(copy)) == 4


def test_columns_that_nobody_asks_for_are_not_decoded(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"input": "q", "sound": {"bytes": b"no sound", "path": None}, "many": []}])
    table.cast_column("sound", datasets.Audio()).save_to_disk(tmp_path / "disk")
    (row,) = (row for _, row in open_rows(str(tmp_path / "disk")).scan())
    assert isinstance(row, dict) and row["sound"]["bytes"] == b"no sound"


def test_large_rows_are_read_a_few_at_once(
    stored: Callable[..., str], lines: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.data.rows.BATCH_BYTES", 3000)
    rows = [{"input": f"{i} " + "x" * 1000, "label": i} for i in range(10)]
    for path in (stored("parquet", rows), lines(rows)):
        found = open_rows(path)
        assert found.at_once == 2 and [row for _, row in found.scan()] == rows
        section = DataSection(path=[path, path], probs=[0.5, 0.5], label_key="label")
        kept = load_tasks(section, evaluation=False).keep(lambda task: task.label % 2 == 0, "odd")
        assert {task.label for task in kept} == {0, 2, 4, 6, 8}


def test_json_in_a_column_is_read(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"input": datasets.Value("string"), "label": datasets.Json()})
    table = datasets.Dataset.from_list(
        [{"input": "q", "label": {"a": 1}}, {"input": "q", "label": [2]}], features=features
    )
    table.save_to_disk(tmp_path / "disk")
    tasks = load_tasks(DataSection(path=str(tmp_path / "disk"), label_key="label"), evaluation=False)
    assert [task.label for task in tasks] == [{"a": 1}, [2]]


def test_packed_lines_blank_lines_and_a_mark_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress('\ufeff{"input": "a"}\n\n   \n{"input": "b"}'.encode()))
    assert [(n, row) for n, row in open_rows(str(path)).scan()] == [(0, {"input": "a"}), (3, {"input": "b"})]


def test_lines_that_are_no_json_are_bad_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'{"input": "a"}\n{"input": \n[1]\n{"input": "\xff"}\n{"input": "b"}\n{"input": 3}\n{"other": "c"}\n'
    )
    with pytest.raises(DataError, match=r"row 1 of .*data.jsonl: no JSON"):
        load_tasks(DataSection(path=str(path)), evaluation=False)
    tasks = load_tasks(DataSection(path=str(path), on_error="skip"), evaluation=False)
    assert [task.id for task in tasks] == ["row-0", "row-4"]
    assert "5 of 7 rows skipped: row 1, row 2, row 3, row 5, row 6" in caplog.text
    assert "there is no 'input' in it; it has other" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no such file"),
        ("empty.jsonl", "", "the file is empty"),
        ("blank.jsonl", "\n \n", "there are only blank lines in it"),
        ("none.json", "[]", "the list in it is empty"),
        ("wide.jsonl", '{"input": "a"}'.encode("utf-16"), "is UTF-16 or UTF-32: save it as UTF-8"),
        ("wide.json", '[{"input": "a"}]'.encode("utf-16-le"), "is UTF-16 or UTF-32"),
        ("wide.csv", "input\na\n".encode("utf-16"), "is UTF-16 or UTF-32"),
        ("latin.json", '[\n{"input": "\xe9"}]'.encode("latin-1"), "not UTF-8: there is a byte 0xe9 in line 2"),
        ("latin.jsonl", '{"input": "a"}\n{"input": "\\\\\xe9"}'.encode("latin-1"), "row 1 of .*: not UTF-8: .* 0xe9"),
        ("latin.csv", "input\na\n\xe9\n".encode("latin-1"), "row 1 of .*: not UTF-8: .* 0xe9"),
        ("pretty.json", '{\n "input": "a"\n}', "objects over several lines: write one row a line"),
        ("pretty.jsonl", '{\n "input": "a"\n}\n{\n "input": "a"\n}', "objects over several lines"),
        ("inside.json", '{"data": [\n{"input": "a"},\n{"input": "b"}\n]}', "one object, with a list in 'data'"),
        ("inside.jsonl", '{"data": [{"input": "a"}]}', "one object, with a list in 'data'"),
        ("list.jsonl", '[\n{"input": "a"},\n{"input": "b"}\n]', "it is a list: give the file the ending .json"),
        ("half.jsonl", '{"input": "\\ud800 lone"}', r"row 0 of .*half of a surrogate pair in it, \\ud800"),
        ("half.json", '[{"input": "a", "\\uDC00": 1}]', "row 0 of .*half of a surrogate pair"),
        ("text.md", "hello", "files are read by their ending: .jsonl, .json, .parquet"),
        ("broken.json", "[1, ", "is no JSON"),
        ("twice.csv", "input,y,y\na,1,2\n", "two of its columns are called 'y'"),
        ("header.csv", "input,y\n\n", "there are no rows below its header"),
        ("broken.parquet", "PARQUET?", "broken.parquet"),
        ("./nowhere", None, "there is no such file or folder"),
    ],
)
def test_what_cannot_be_read_says_so(name: str, content: str | bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    path = name if name.startswith("./") else str(tmp_path / name)
    with pytest.raises(DataError, match=message):
        load_tasks(DataSection(path=path), evaluation=False)


def test_a_column_may_appear_late(lines: Callable[..., str], tmp_path: Path) -> None:
    rows = [{"other": "a"}] * 150 + [{"input": "b", "label": 1}, {"input": "c"}]
    for path in (lines(rows), str(tmp_path / "data.json")):
        Path(path).write_text(json.dumps(rows)) if path.endswith(".json") else None
        with pytest.raises(DataError, match=r"row 0 of .*there is no 'input' in it; it has other"):
            load_tasks(DataSection(path=path), evaluation=False)
        with pytest.raises(DataError, match=r"no column 'question' \(--data.input-key\). It has: other"):
            load_tasks(DataSection(path=path, input_key="question", on_error="skip"), evaluation=False)
        for looked_at in (None, 0):
            section = DataSection(path=path, label_key="label", on_error="skip", check_images=looked_at)
            assert [task.id for task in load_tasks(section, evaluation=False)] == ["row-150"]


def test_pairs_of_surrogates_are_text(lines: Callable[..., str]) -> None:
    tasks = load_tasks(DataSection(path=lines(['{"input": "\\ud83c\\udf88"}'])), evaluation=False)
    assert tasks[0].prompt == "\N{BALLOON}"


@pytest.mark.parametrize("path", ["nofile", "some/nofile", "nofile@part"])
def test_what_the_hub_does_not_give_is_no_file_either(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach it")

    for name in ("load_dataset_builder", "load_dataset", "get_dataset_config_names"):
        monkeypatch.setattr(f"datasets.{name}", offline)
    said = f"--data.path {path}: no such file or folder here, and the hub does not give it: Couldn't reach it"
    with pytest.raises(DataError, match=said):
        load_tasks(DataSection(path=path), evaluation=False)


@pytest.mark.slow
def test_the_hub(tmp_path: Path) -> None:
    """A dataset with two configurations, by its id, from a server that answers the hub's routes."""
    labels = [7, "7", ["7"], {"a": 1}, {"b": 2}, 2**55 + 1]
    mixed = tmp_path / "hub" / "some" / "mixed"
    mixed.mkdir(parents=True)
    (mixed / "train.jsonl").write_text("".join(json.dumps({"label": label}) + "\n" for label in labels))
    (mixed / "test.jsonl").write_text('{"label": "held out"}\n')
    repo = tmp_path / "hub" / "some" / "sums"
    for part, answer in (("easy", 2), ("hard", 1764)):
        (repo / part).mkdir(parents=True)
        (repo / part / "train.jsonl").write_text(json.dumps({"input": part, "label": answer}) + "\n")
    yaml = "".join(f"- config_name: {part}\n  data_files: {part}/*.jsonl\n" for part in ("easy", "hard"))
    (repo / "README.md").write_text(f"---\nconfigs:\n{yaml}---\n")
    code = (
        "import sys; from agentrl.data import open_rows; from agentrl import DataError\n"
        "print(open_rows('some/sums@hard').row(0), open_rows('some/sums@easy').row(0))\n"
        "print([row['label'] for _, row in open_rows('some/mixed').scan()], open_rows('some/mixed', 'test').row(0))\n"
        "for wrong in ('some/sums', 'some/other', 'some/sums@harder'):\n"
        "    try: open_rows(wrong)\n"
        "    except DataError as error: print('ERROR', error)\n"
    )
    with serving(tmp_path / "hub") as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
    said: list[Any] = done.stdout.splitlines()
    assert said[0] == "{'input': 'hard', 'label': 1764} {'input': 'easy', 'label': 2}", done.stderr
    assert said[1] == f"{labels} {{'label': 'held out'}}"
    assert len(said) == 5 and all(line.startswith("ERROR --data.path some/") for line in said[2:])
    assert "easy" in said[2] and "other" in said[3] and "harder" in said[4]
