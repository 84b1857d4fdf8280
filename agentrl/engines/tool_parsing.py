"""Tool calls out of model text with one of vLLM's parsers, block by block where the parser gives up on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..messages import ToolCall
from ..registry import suggest
from .hermes import END, START, malformed_call, parse_hermes, tool_call

Extract = Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""(text, tools) -> (content before the calls, [(name, arguments as JSON text)]); no calls when nothing parses."""

MARKERS = {
    "json": (START, END),
    "hermes": (START, END),
    "qwen3_json": (START, END),
    "qwen3_xml": (START, END),
    "qwen3_coder": (START, END),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "functiongemma": ("<start_function_call>", "<end_function_call>"),
    "dots": ("<dots_function_call>", "</dots_function_call>"),
}
"""Parsers whose calls stand one by one between markers. Others are all or nothing."""


def parse_tool_calls(
    text: str, tools: list[dict[str, Any]], extract: Extract, markers: tuple[str, str] | None
) -> tuple[str, list[ToolCall]]:
    """(text before the first call, the calls, each with an id of ours).

    A parser returns no call at all when one block of several is malformed: then each block is parsed alone, and one that
    still fails is one malformed call (name '', arguments None, raw = the block).
    """
    content, found = extract(text, tools)
    if found:
        return content.strip(), [tool_call(name, arguments) for name, arguments in found]
    if markers is None or markers[0] not in text:
        return text, []
    start, end = markers
    before, *blocks = text.split(start)
    return before.strip(), [
        call for block in blocks for call in _parse_block(block.partition(end)[0], tools, extract, markers)
    ]


def _parse_block(block: str, tools: list[dict[str, Any]], extract: Extract, markers: tuple[str, str]) -> list[ToolCall]:
    found = extract(f"{markers[0]}{block}{markers[1]}", tools)[1]
    return [tool_call(name, arguments) for name, arguments in found] or [malformed_call(block.strip())]


def parser_class(name: str) -> Any:
    """vLLM's parser of that name, or None for "json", which needs none. Raises ConfigError with the nearest names."""
    if name == "json":
        return None
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        near = suggest(name, ["json", *ToolParserManager.list_registered()])
        raise ConfigError(f"model.tool_parser: vLLM has no tool parser {name!r}.{near}") from error


def vllm_extract(parser: Any, tokenizer: Any) -> Extract:
    """An `Extract` over a parser class of vLLM's. Raises ConfigError when it cannot work with this tokenizer."""
    if parser is None:
        return _json_extract
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

    try:
        parser(tokenizer, [])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.tool_parser: {parser.__name__} does not fit this model's tokenizer: {error}"
        ) from error

    def extract(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        params = [ChatCompletionToolsParam.model_validate(_function_tool(tool)) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="", tools=params or None)
        result = parser(tokenizer, params).extract_tool_calls(text, request)
        return result.content or "", [(call.function.name, call.function.arguments) for call in result.tool_calls]

    return extract


def _json_extract(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """All or nothing, so that a malformed block is told apart by `parse_tool_calls` like any other parser's."""
    content, calls = parse_hermes(text)
    whole = all(call.name for call in calls)
    return content, [(call.name, call.raw) for call in calls] if whole else []


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool, from itself or from the bare function schema."""
    return tool if "function" in tool else {"type": "function", "function": tool}
