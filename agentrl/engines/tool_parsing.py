"""Tool calls out of model text with one of vLLM's parsers, block by block where the parser gives up on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..messages import ToolCall
from .hermes import malformed_call, tool_call

Extract = Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""(text, tools) -> (content before the calls, [(name, arguments as JSON text)]); no calls when nothing parses."""

MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_json": ("<tool_call>", "</tool_call>"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
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


def vllm_extract(parser_name: str, tokenizer: Any) -> Extract:
    """An `Extract` over vLLM's parser of that name; loads it now. Raises ConfigError when there is none."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(parser_name)
        parser_class(tokenizer, [])
    except (KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.tool_parser = {parser_name!r} does not fit this model: {error}") from error

    def extract(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        params = [ChatCompletionToolsParam.model_validate(_function_tool(tool)) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="", tools=params or None)
        result = parser_class(tokenizer, params).extract_tool_calls(text, request)
        return result.content or "", [(call.function.name, call.function.arguments) for call in result.tool_calls]

    return extract


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool, from itself or from the bare function schema."""
    return tool if "function" in tool else {"type": "function", "function": tool}
