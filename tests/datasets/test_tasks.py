"""What reaches a task: prompts, pictures, tools, mixtures; and what is said about rows that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from agentrl import DataError, Image
from agentrl.assemble import make_tasks
from agentrl.config import Config, DataSection
from agentrl.data import load_tasks, read_row, row_task
from agentrl.data.mixture import mixed
from agentrl.data.pictures import bounded
from agentrl.rollout.task_source import TaskSource

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def section(**options: Any) -> DataSection:
    return DataSection.model_validate({"path": "data.jsonl", **options})


def test_a_bad_row_is_named_before_anything_else_happens(lines: Callable[..., str]) -> None:
    path = lines([{"input": "a"}, {"input": "b"}, {"input": None}])
    with pytest.raises(DataError, match=r"row 2 of .*'input' is None"):
        load_tasks(section(path=path), evaluation=False)
    assert len(load_tasks(section(path=path, max_samples=2), evaluation=False)) == 2
    kept = load_tasks(section(path=path, on_error="skip"), evaluation=False)
    assert [task.id for task in kept] == ["row-0", "row-1"]


@pytest.mark.parametrize("form", ["http://host/red.png", "nowhere.png", b"no picture", 3, {"file": "red.png"}])
def test_a_picture_that_is_none_names_its_row(tmp_path: Path, form: Any) -> None:
    with pytest.raises(DataError, match="row 5 of"):
        row_task(5, {"input": "a", "image": form}, section(path=str(tmp_path / "data.jsonl"), image_key="image"))


def test_a_picture_that_is_not_there_is_named_by_its_path(tmp_path: Path) -> None:
    options = section(path=str(tmp_path / "data.jsonl"), image_key="image")
    with pytest.raises(DataError, match=f"row 0 of .*cannot read an image from {tmp_path}/nope.png: "):
        row_task(0, {"input": "a", "image": "nope.png"}, options)


def test_a_template_stands_around_strings() -> None:
    templated = section(template="Question: {}\n{x} Answer:")
    assert read_row({"input": "1+{}?"}, templated).prompt == "Question: 1+{}?\n{x} Answer:"
    with pytest.raises(DataError, match="template is for prompts that are strings"):
        read_row({"input": [{"role": "user", "content": "a"}]}, templated)


@pytest.mark.parametrize("tools", [[WEATHER], '[{"type": "function", "function": {"name": "weather"}}]'])
def test_tools_of_a_row(tools: Any) -> None:
    shown = read_row({"input": "a", "tools": tools}, section(tools_key="tools"))
    assert shown.tools[0]["function"]["name"] == "weather"
    assert row_task(0, {"input": "a", "tools": tools}, section(tools_key="tools")).tools == shown.tools
    with pytest.raises(DataError, match="tools are"):
        read_row({"input": "a", "tools": "{}"}, section(tools_key="tools"))


def test_what_a_columnar_file_fills_with_nulls_is_left_out() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    row = {
        "input": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "image": None}], "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    }
    shown = read_row(row, section(tools_key="tools"))
    said: Any = shown.prompt
    assert said[0] == {"role": "user", "content": ["hi"]} and said[1]["content"] is None
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert shown.tools == ({"type": "function", "function": {"name": "f"}},)


def test_conversations_with_the_keys_from_and_value() -> None:
    said = ["system", "human", "gpt", "function", "tool", "assistant"]
    names = ["system", "user", "assistant", "tool", "tool", "assistant"]
    row = {"input": [{"from": who, "value": who, "weight": None} for who in said]}
    prompt = row_task(0, row, section()).prompt
    assert prompt == [{"role": name, "content": who} for who, name in zip(said, names, strict=True)]
    with pytest.raises(DataError, match=r"row 0 of .*: a message is from 'narrator', which is none of human, gpt"):
        row_task(0, {"input": [{"from": "narrator", "value": "x"}]}, section())


CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": "bad"}


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([CALLING], "tool_calls are a list, not 'bad'"),
        ([{**CALLING, "tool_calls": ["x"]}], "a tool call has a function with a name"),
        ([{"role": "narrator", "content": "x"}], "'narrator', which is none of system, user, assistant, tool"),
        ([{"role": "user", "content": "x"}, {"role": "tool"}], "message 1, of the tool, has no content"),
        ([{"role": "system", "content": []}], "message 0, of the system, has no content"),
        ([{"from": "human"}], "message 0, of the user, has no content"),
    ],
)
def test_messages_that_are_none_make_a_bad_row(messages: list[Any], what: str) -> None:
    with pytest.raises(DataError, match=f"row 0 of .*: .*{what}"):
        row_task(0, {"input": messages}, section())


def test_developers_are_the_system_and_tools_may_answer_nothing() -> None:
    said = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}, {"role": "tool", "content": ""}]
    assert row_task(0, {"input": said}, section()).prompt == [{"role": "system", "content": "d"}, *said[1:]]


def test_where_pictures_stand_in_a_prompt(tmp_path: Path, forms: dict[str, Any]) -> None:
    """Before a string, at its <image>, in the places of messages, or before the first text of the user."""
    pictures = section(image_key="image")

    def order(prompt: Any, *images: Any) -> list[Any]:
        shown = read_row({"input": prompt, "image": list(images)}, pictures, tmp_path)
        said: Any = shown.prompt if isinstance(shown.prompt, list) else [{"content": [*shown.images, shown.prompt]}]
        return ["I" if isinstance(part, Image) else part for message in said for part in message["content"]]

    def user(*parts: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    image, text = {"type": "image"}, {"type": "text", "text": "b"}
    assert order("a", "red.png") == ["I", "a"]
    assert order("a <image> b <image>", "red.png", forms["bytes"]) == ["a ", "I", " b ", "I"]
    assert order(user(text, image), "red.png") == ["b", "I"]
    assert order([{"role": "user", "content": "a"}], "red.png") == ["I", "a"]
    said = [{"from": "human", "value": "<image>a<image>"}, {"from": "gpt", "value": "<image>?"}]
    said += [{"from": "human", "value": "b <image>"}]
    assert order(said[:1], *["red.png"] * 2) == ["I", "a", "I"]
    shown: Any = read_row({"input": said, "image": ["red.png"] * 3}, pictures, tmp_path).prompt
    assert [len(message["content"]) for message in shown] == [3, 8, 2] and shown[2]["content"][0] == "b "
    assert read_row({"input": said, "image": []}, pictures).prompt[0]["content"] == "<image>a<image>"  # type: ignore[index]
    assert order(user(text, {"type": "image", "image": "red.png"})) == ["b", "I"]
    assert order(user({"type": "image_url", "image_url": {"url": forms["data"]}}, text)) == ["I", "b"]
    text_alone = {"role": "user", "content": "<image>"}
    for prompt, images in (
        ("<image>", 2),
        (user(image, image), 1),
        (user(image), 2),
        ([text_alone], 2),
        ([text_alone] * 2, 1),
    ):
        with pytest.raises(DataError, match=r"places? "):
            order(prompt, *["red.png"] * images)


def test_a_picture_in_an_object_in_a_part(stored: Callable[..., str], forms: dict[str, Any]) -> None:
    """As columnar files store messages, with their pictures as features of `datasets` or as plain structs."""
    import datasets

    part = {"type": "image", "image": forms["dict"], "text": None}
    rows = [{"input": [{"role": "user", "content": [part, {"type": "text", "image": None, "text": "b"}]}]}]
    content = datasets.List(
        {"type": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
    )
    features = datasets.Features({"input": datasets.List({"role": datasets.Value("string"), "content": content})})
    path = f"{Path(stored('parquet', rows)).parent}/features.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    for place in (stored("parquet", rows), path):
        (task,) = load_tasks(section(path=place), evaluation=False)
        assert [image.pil.getpixel((0, 0)) for image in task.images] == [(200, 10, 10)]
    with pytest.raises(DataError, match=r"row 0 of .*: a picture as an object has one of .*; this has file"):
        row_task(0, {"input": [{"role": "user", "content": [{"type": "image", "image": {"file": "x"}}]}]}, section())


def test_pictures_in_base64(forms: dict[str, Any]) -> None:
    text = forms["data"].partition(",")[2]
    for form in ({"bytes": text}, {"base64": text}, {"bytes": text, "path": "gone.png"}):
        (image,) = row_task(0, {"input": "a", "image": form}, section(image_key="image")).images
        assert image.pil.getpixel((0, 0)) == (200, 10, 10)
    with pytest.raises(DataError, match="too long for a path: base64 has 'data:image/png;base64,' before it") as said:
        row_task(0, {"input": "a", "image": text * 100}, section(image_key="image"))
    assert len(str(said.value)) < 300


@settings(deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 4000), st.integers(0, 4000))
@example(1, 10_000, 1, 99)
@example(10_000, 1, 1, 0)
def test_pixels_are_within_their_bounds(width: int, height: int, least: int, above: int) -> None:
    size = bounded(Image(PILImage.new("RGB", (width, height))), least, least + above).size
    before, after = width * height, size[0] * size[1]
    if before < least:
        assert (size[0] - 1) * (size[1] - 1) <= least <= after
    elif before > least + above:
        assert after <= least + above
    else:
        assert size == (width, height)


def test_pictures_are_resized_for_engine_and_trainer_alike(lines: Callable[..., str], forms: dict[str, Any]) -> None:
    path = lines([{"input": "a", "image": forms["relative"]}])
    (task,) = load_tasks(section(path=path, image_key="image", min_pixels=64), evaluation=False)
    assert task.images[0].size == (8, 8) and task.images[0].pil.getpixel((3, 3)) == (200, 10, 10)
    assert Image.from_png(task.images[0].png).sha256 == task.images[0].sha256


def test_pictures_after_the_first_rows_may_stay_closed(
    lines: Callable[..., str], forms: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"input": "a", "image": ["red.png", "red.png"] if i == 1 else ["gone.png"] if i else []} for i in range(3)]
    path = lines(rows)
    tasks = load_tasks(section(path=path, image_key="image", check_images=2), evaluation=False)
    assert len(tasks) == 3 and tasks.max_images == 2
    assert len(tasks.keep(lambda task: True, "long")) == 3
    with pytest.raises(DataError, match="row 2 of"):
        tasks[2]
    skipping = load_tasks(section(path=path, image_key="image", check_images=2, on_error="skip"), evaluation=False)
    assert [task.id for task in skipping] == ["row-0", "row-1", "row-0"] and skipping[-1].id == "row-0"
    assert [task.id for task in skipping[2:0:-1]] == ["row-1", "row-1"] and len(skipping) == 3
    (tmp_path / "red.png").unlink()
    with pytest.raises(DataError, match="no row is left to use"):
        skipping[1:][0]


# ------------------------------------------------------------------ several datasets


def test_datasets_after_one_another_and_mixed(lines: Callable[..., str]) -> None:
    small = lines(({"input": f"s{i}"} for i in range(3)), "small.jsonl")
    large = lines(({"input": f"l{i}"} for i in range(60)), "large.jsonl")
    both = load_tasks(section(path=[small, large]), evaluation=False)
    assert [task.prompt for task in both][:4] == ["s0", "s1", "s2", "l0"] and len(both) == 63
    assert both[3].id == "large/row-0" and len({task.id for task in both}) == 63
    mix = section(path=[small, large], probs=[0.25, 0.75])
    drawn = [task.prompt for task in load_tasks(mix, evaluation=False, seed=3)]
    assert drawn == [task.prompt for task in load_tasks(mix, evaluation=False, seed=3)]
    assert drawn != [task.prompt for task in load_tasks(mix, evaluation=False, seed=4)]
    counts = Counter(drawn)
    assert set(counts) == {task.prompt for task in both}, "nothing is cut off"
    assert all(count == 1 for prompt, count in counts.items() if str(prompt).startswith("l"))


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(0, 9), st.data())
def test_a_mixture_passes_over_every_dataset(sizes: list[int], seed: int, data: st.DataObject) -> None:
    probs = data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes)))
    which, numbers = mixed([np.arange(size) for size in sizes], probs, seed)
    for source, size in enumerate(sizes):
        mine = numbers[which == source]
        assert mine.tolist() == [i % size for i in range(len(mine))] and len(mine) >= size
    last = numbers[which == which[-1]]
    assert len(last) == sizes[int(which[-1])], "it ends with the first pass of the last"


@pytest.mark.parametrize("probs", [[], [1.0] * 300])
def test_hundreds_of_datasets_keep_their_places(probs: list[float]) -> None:
    which, numbers = mixed([np.arange(2)] * 300, probs, 0)
    assert set(which.tolist()) == set(range(300)) and set(numbers.tolist()) == {0, 1}


def test_the_order_is_that_of_the_seed_also_after_a_resume(lines: Callable[..., str]) -> None:
    path = lines({"input": str(i)} for i in range(40))

    def draws(seed: int, first: int) -> list[Any]:
        source = TaskSource(load_tasks(section(path=path), evaluation=False), seed=seed, shuffle=True)
        return [task.prompt for i in range(first, 60) if (task := source.at(i)) is not None]

    assert draws(1, 0)[25:] == draws(1, 25) and draws(1, 0) != draws(2, 0)
    assert sorted(draws(1, 0)[:40], key=int) == [str(i) for i in range(40)]


def test_what_is_wrong_with_the_test_path_names_its_flag(lines: Callable[..., str]) -> None:
    for evaluation, flag in ((True, "--data.test-path"), (False, "--data.path")):
        options = section(path="gone.jsonl", test_path="gone.jsonl")
        with pytest.raises(DataError, match=f"^{flag} gone.jsonl: there is no such file"):
            load_tasks(options, evaluation=evaluation)
    with pytest.raises(DataError, match=r"^--data.test-path .* is one file, and has no split 'test'"):
        load_tasks(section(test_path=lines([{"input": "a"}]), test_split="test"), evaluation=True)


def test_the_test_split_is_of_the_test_path(lines: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for split in ("train", "test"):
        (tmp_path / "corpus" / f"{split}.jsonl").write_text(f'{{"input": "{split}"}}\n')
    corpus = str(tmp_path / "corpus")
    config = Config.model_validate({"data": {"path": corpus, "test_path": corpus, "test_split": "test"}})
    assert [make_tasks(config, split)[0].prompt for split in ("train", "test")] == ["train", "test"]  # type: ignore[index]
    assert not list(make_tasks(Config.model_validate({"data": {"path": corpus}}), "test"))
