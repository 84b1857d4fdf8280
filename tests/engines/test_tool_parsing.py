"""Block by block when the whole does not parse, over a parser that gives up like vLLM's Hermes."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.engines.tool_parsing import MARKERS, parse_tool_calls, parser_class, vllm_extract

GOOD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def all_or_nothing(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    try:
        calls = [json.loads(block) for block in re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        return text.split("<tool_call>")[0], [(call["name"], json.dumps(call["arguments"])) for call in calls]
    except (ValueError, KeyError):
        return text, []


def parse(text: str) -> tuple[str, list[tuple[str, Any, str]]]:
    content, calls = parse_tool_calls(text, [], all_or_nothing, MARKERS["hermes"])
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, call.arguments, call.raw) for call in calls]


def test_what_parses_is_taken_as_it_is() -> None:
    assert parse(f"first {GOOD}{GOOD}") == ("first", [("add", {"a": 1}, '{"a": 1}')] * 2)
    assert parse("no calls") == ("no calls", [])


def test_one_bad_block_costs_one_call() -> None:
    content, calls = parse(f"so {GOOD}<tool_call>{{oops</tool_call>{GOOD}")
    assert content == "so"
    assert [call[0] for call in calls] == ["add", "", "add"]
    assert calls[1] == ("", None, "{oops")


def test_an_open_block_is_malformed() -> None:
    assert parse("<tool_call>{") == ("", [("", None, "{")])


def test_arguments_that_are_no_object_are_none() -> None:
    assert parse('<tool_call>{"name": "add", "arguments": [1]}</tool_call>')[1] == [("add", None, "[1]")]


def test_json_is_hermes_without_vllm() -> None:
    assert parser_class("json") is None
    extract = vllm_extract(None, None)
    content, calls = parse_tool_calls(f"so {GOOD}<tool_call>{{oops</tool_call>{GOOD}", [], extract, MARKERS["json"])
    assert content == "so"
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("", None), ("add", {"a": 1})]


def test_without_markers_nothing_is_cut() -> None:
    assert parse_tool_calls("<tool_call>{", [], all_or_nothing, None) == ("<tool_call>{", [])
