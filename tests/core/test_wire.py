"""Values to JSON and back."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from typing import Any

import numpy as np
import pytest
from agentrl.agent_server.agent_wire import EpisodeRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from agentrl import Action, Image, Task, Text, ToolCall, wire
from agentrl.errors import DataError, EnvError
from agentrl.messages import normalize
from agentrl.schemas import OpenSession, TasksReply

RED, BLUE = (Image(PILImage.new("RGB", (3, 2), colour)) for colour in ("red", "blue"))


def through(form: Any) -> Any:
    """What the other side reads."""
    return json.loads(wire.dump(form))


def travelled(task: Task) -> list[Task]:
    """A task as each kind of message brings it."""
    form = through(wire.task_form(task))
    policy = {"base_url": "http://h/v1", "anthropic_base_url": "http://h", "api_key": "k", "model": "m"}
    order = {"episode_id": "e", "attempt": 0, "task": form, "policy": policy, "idempotency_key": "k"}
    opened = OpenSession(env="e", task=form).task
    assert opened is not None
    forms = [opened, TasksReply(tasks=[form], offset=0).tasks[0], EpisodeRequest.model_validate(order).task]
    return [wire.read_task(form.model_dump()) for form in forms]


@pytest.mark.parametrize(
    "observation",
    [
        "plain é",
        "",
        [Text("look"), RED, "again", BLUE, RED],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": [RED, Text("what?")]}],
        [{"role": "tool", "tool_call_id": "c1", "content": None}],
        [],
    ],
)
def test_an_observation_comes_back_the_same(observation: Any) -> None:
    sent: wire.Images = {}
    known: wire.Images = {}
    back = wire.read_observation(through(wire.observation_form(observation, sent)), known)
    assert normalize(back) == normalize(observation)
    assert set(sent) == set(known)


def test_an_image_travels_once() -> None:
    sent: wire.Images = {}
    first, again = (through(wire.observation_form([RED], sent))[0] for _ in range(2))
    assert base64.b64decode(first["data"]) == RED.png
    assert again == {"type": "image", "sha256": RED.sha256}
    assert list(wire.unsent_images({"messages": [{"role": "user", "content": [again]}]}, {})) == [RED.sha256]
    with pytest.raises(DataError, match="not sent before"):
        wire.read_observation([again], {})
    assert wire.read_observation([again], {RED.sha256: RED}) == [RED]


@pytest.mark.parametrize(
    "form",
    [
        None,
        7,
        [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}],
        [{"type": "image", "image": "/etc/passwd"}],
        [{"type": "image", "sha256": "0" * 64, "data": base64.b64encode(RED.png).decode()}],
        [{"type": "image", "data": "not base64!"}],
        [{"type": "image", "data": 3}],
        [3],
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": {"type": "image"}}]},
    ],
)
def test_what_is_no_observation_is_refused(form: Any) -> None:
    with pytest.raises(DataError):
        wire.read_observation(form, {})


@pytest.mark.parametrize("label", [7, "7", ["7"], 2**55 + 1, {"a": {"b": [None, True]}}, None, 0.1, -0.0, "é"])
def test_a_label_keeps_its_type(label: Any) -> None:
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    task = Task("t", "prompt", label, (RED,), {"n": label, "picture": BLUE}, tools=tools)
    for back in travelled(task):
        assert back == task
        assert type(back.label) is type(label)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
stored = st.recursive(
    plain
    | st.binary(max_size=9)
    | st.datetimes(timezones=st.none() | st.just(dt.UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.fixed_dictionaries({"type": st.sampled_from([*wire.TAGS, "object", "image", "text"]), "data": inner})
        | st.fixed_dictionaries({"bytes": st.binary(max_size=9), "path": st.none() | st.text(max_size=3)})
        | st.fixed_dictionaries({"type": st.just("image"), "sha256": inner, "data": inner})
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(stored)
def test_a_row_keeps_the_types_it_was_stored_with(value: Any) -> None:
    back = wire.read_task(json.loads(wire.dump(wire.task_form(Task("t", row={"x": value})), nan=True)))
    assert repr(back.row["x"]) == repr(value).replace(", fold=1", "")


@pytest.mark.parametrize(
    ("tag", "data"), [("bytes", "!"), ("datetime", 3), ("timedelta", "x"), ("decimal", []), ("uuid", "x")]
)
def test_a_tagged_value_that_is_none_is_refused(tag: str, data: Any) -> None:
    with pytest.raises(DataError, match=f"is no {tag}"):
        wire.read_task({"id": "t", "row": {"x": {"type": tag, "data": data}}})


def test_what_has_travelled_is_kept_without_pixels() -> None:
    sent: wire.Images = {}
    known: wire.Images = {}
    for _ in range(2):
        form = wire.observation_form([Image(RED.pil)], sent)
        (seen,) = wire.read_observation(form, known)
        assert seen.size == (3, 2)
    assert [image._pil for image in (*sent.values(), *known.values())] == [None, None]
    assert sent == known == {RED.sha256: RED}


def test_a_prompt_of_messages_and_numpy_labels() -> None:
    task = Task("t", [{"role": "user", "content": [RED, "what?"]}], np.arange(3), (), {"x": np.float32(0.5)})
    back = wire.read_task(through(wire.task_form(task)))
    assert normalize(back.prompt) == normalize(task.prompt or "")  # type: ignore[arg-type]
    assert (back.label, back.row) == ([0, 1, 2], {"x": 0.5})


@pytest.mark.parametrize("label", [{1: 2}, {3}, object()])
def test_a_label_that_json_would_change_is_refused(label: Any) -> None:
    with pytest.raises(DataError, match="task t"):
        wire.task_form(Task("t", label=label))


names = st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda v: st.lists(v) | st.dictionaries(names, v)
)


@st.composite
def tool_calls(draw: st.DrawFn) -> ToolCall:
    name = draw(names)
    if draw(st.booleans()):
        return ToolCall(draw(names), name, None, draw(st.text()))
    arguments = draw(st.dictionaries(names, values, max_size=3))
    return ToolCall(draw(names), name, arguments, json.dumps(arguments, indent=draw(st.none() | st.integers(0, 2))))


@given(st.text(), st.lists(tool_calls(), max_size=3), st.sampled_from(["stop", "length"]))
def test_an_action_comes_back_the_same(text: str, calls: list[ToolCall], reason: str) -> None:
    back = wire.read_action(through(wire.action_form(Action(text, tool_calls=calls, finish_reason=reason))))
    assert (str(back), back.tool_calls, back.finish_reason) == (text, tuple(calls), reason)


def test_arguments_as_openai_writes_them() -> None:
    form = {
        "text": "",
        "tool_calls": [{"id": "a", "name": "f", "arguments": '{"x": 1}'}, {"name": "g", "arguments": "{"}],
    }
    assert wire.read_action(form).tool_calls == (ToolCall("a", "f", {"x": 1}, '{"x": 1}'), ToolCall("", "g", None, "{"))


def test_rewards() -> None:
    for none in (None, math.nan, math.inf, "0.5", b"1"):
        assert wire.verdict(none) is None
    assert [wire.verdict(value) for value in (1, np.float32(0.5), np.array(0.25), True)] == [1.0, 0.5, 0.25, 1.0]
    with pytest.raises(EnvError, match="reward"):
        wire.verdict([1, 2])


def test_what_an_env_returns_is_written_as_json() -> None:
    given = {"a": np.float32("nan"), "b": np.arange(2), "c": {np.int64(1): object}, "d": "\ud800", "e": RED}
    given |= {"f": b"\xffx", "g": [(b"\xfe", {b"\xfd"})], "h": b"text"}
    written = json.loads(wire.dump(given))
    assert (written["a"], written["b"], list(written["c"]), written["d"]) == (None, [0, 1], ["1"], "?")
    assert (written["f"], written["g"], written["h"]) == ("\ufffdx", [["\ufffd", ["\ufffd"]]], "text")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EnvError, match="JSON"):
        wire.dump(loop)
