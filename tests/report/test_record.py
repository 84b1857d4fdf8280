"""Lines of rollouts/: every episode once, with its own advantages, and nothing that JSON cannot hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image as PILImage

from agentrl.env import Task
from agentrl.messages import Image, Text, message_record
from agentrl.report.record import batch_records, episode_record, group_records, row_record
from agentrl.rollout.group import Batch, Group
from agentrl.training import TrainReport

from .builders import episode, group, row


def test_a_row_is_plain_and_its_lists_are_of_one_length() -> None:
    record = row_record(row(3, 2), np.array([0, 0, 1, 1, 1], np.float32))
    assert json.loads(json.dumps(record)) == record
    assert record["token_ids"] == [0, 1, 2, 3, 4] and record["loss_mask"] == [0, 0, 1, 1, 1]
    assert record["versions"] == [-1, -1, 0, 0, 0] and record["logprobs"] == [0, 0, -0.5, -0.5, -0.5]
    assert record["advantage"] == [0, 0, 1, 1, 1]


def test_an_untrained_row_has_no_advantage() -> None:
    assert row_record(row(), None)["advantage"] is None


def test_pictures_are_their_hashes() -> None:
    image = Image(PILImage.new("RGB", (4, 4)))
    record = message_record({"role": "user", "content": [image, Text("hi")], "tool_call_id": "x"})
    assert record == {
        "role": "user",
        "content": [{"type": "image", "sha256": image.sha256}, {"type": "text", "text": "hi"}],
        "tool_call_id": "x",
    }
    assert message_record({"role": "user", "content": "hi"}) == {"role": "user", "content": "hi"}
    assert message_record({"role": "assistant", "content": None})["content"] is None


def test_every_episode_of_a_batch_comes_once_with_its_own_advantages() -> None:
    first = group(
        episode(1.0, group="a", sample=1, rows=[row(2, 1), row(1, 1)]),
        episode(None, group="a", sample=2),
        episode(0.0, group="a", sample=0, rows=[row(3, 1)]),
    )
    dropped = group(episode(0.0, group="b"), outcome="filtered")
    rows = first.rows
    advantages = [np.full(len(r), i + 1, np.float32) for i, r in enumerate(rows)]
    records = list(batch_records(Batch([first], [dropped]), TrainReport(True, {}, advantages), step=7, env="e"))
    found = {record["rollout_id"]: record for record in records}
    assert len(records) == len(found) == 4
    assert {name: record["outcome"] for name, record in found.items()} == {
        "a-0": "trained",
        "a-1": "trained",
        "a-2": "failed",
        "b-0": "filtered",
    }
    for record in records:
        for line in record["rows"]:
            assert line["advantage"] is None or len(line["advantage"]) == len(line["token_ids"])
    assert [line["advantage"][0] for line in found["a-0"]["rows"]] == [1]
    assert [line["advantage"][0] for line in found["a-1"]["rows"]] == [2, 3]
    assert found["a-2"]["rows"][0]["advantage"] is None
    assert all(record["step"] == 7 for record in records)


def test_groups_left_behind_say_what_became_of_them() -> None:
    groups = [group(episode(), outcome="cancelled"), group(episode(), outcome="filtered")]
    assert [record["outcome"] for record in group_records(groups, 1, "e")] == ["cancelled", "filtered"]


@pytest.mark.parametrize(("own", "said"), [("", "only"), ("one of two", "one of two")])
def test_an_episode_that_never_came_back_has_its_environment(own: str, said: str) -> None:
    lost = Group(3, Task("t", env=own), 2, 0, [], outcome="cancelled")
    assert [record["env"] for record in group_records([lost], 1, "only")] == [said] * 2


def test_an_episode_is_one_json_object() -> None:
    record = episode_record(episode(error="EnvError", metrics={"clicks": 1.0}), step=0, outcome="failed")
    assert json.loads(json.dumps(record)) == record
    assert record["error"]["class"] == "EnvError" and record["metrics"] == {"clicks": 1.0}
    assert set(record) >= {"rollout_id", "group_id", "draw", "sample", "task_id", "env", "step", "rows", "messages"}
    assert set(record) >= {"total_reward", "score", "outcome", "truncated", "finish_reason", "turns"}
