"""Hermes' blocks: what is a call, what is a malformed one, and what is text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.hermes import parse_hermes

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_text_without_a_block_is_itself() -> None:
    assert parse_hermes(" just text\n") == (" just text\n", [])
    assert parse_hermes("") == ("", [])


def test_calls_come_in_order_each_under_an_id_of_its_own() -> None:
    content, calls = parse_hermes(f"Let me see. {GOOD}\n{GOOD.replace('add', 'sub')} and then")
    assert content == "Let me see."
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("sub", {"a": 1})]
    assert calls[0].id != calls[1].id


def test_one_bad_block_of_three_is_one_malformed_call() -> None:
    _, calls = parse_hermes(GOOD + '<tool_call>{"name": "add", "arg</tool_call>' + GOOD)
    assert [call.arguments is None for call in calls] == [False, True, False]
    assert (calls[1].name, calls[1].raw) == ("", '{"name": "add", "arg')


@pytest.mark.parametrize(
    ("block", "name", "raw"),
    [
        ('{"name":"add","arguments":{"a":1,', "", '{"name":"add","arguments":{"a":1,'),
        ('{"name":"add","arguments":null}', "add", "null"),
        ('{"name":"add","arguments":[1]}', "add", "[1]"),
        ('{"name":"add"}', "add", "null"),
        ('{"name":7,"arguments":{}}', "", '{"name":7,"arguments":{}}'),
        ("[1]", "", "[1]"),
        ("", "", ""),
        ("[" * 100_000, "", "[" * 100_000),
        ('{"name":"add","arguments":' + "[" * 100_000, "", None),
        ("9" * 10_000, "", None),
    ],
)
def test_what_is_no_call_is_malformed(block: str, name: str, raw: str | None) -> None:
    _, (call,) = parse_hermes(f"<tool_call>{block}")
    assert (call.name, call.arguments) == (name, None)
    assert raw is None or call.raw == raw


def test_arguments_may_be_json_text() -> None:
    _, (call,) = parse_hermes('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call><|im_end|>')
    assert call.arguments == {"a": 1}


@given(st.text(alphabet='<tool_cal>/{}"name:arguments1,[] \\\ud800', max_size=60))
def test_nothing_a_model_writes_raises(text: str) -> None:
    parse_hermes(text)
    parse_hermes(f"<tool_call>{text}</tool_call>")
