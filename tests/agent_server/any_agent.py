"""An agent that lives by dice and speaks three APIs in one conversation, through the vendors' SDKs."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from .conftest import TOOL

SIP = 100
"""Bytes; no answer is as short."""
THINK_S = 0.06
"""By then the rest of a stream is there."""
RETRY = {"x-stainless-retry-count": "1"}
Dialect = Callable[..., Any]


@dataclass(frozen=True)
class Said:
    """A message in no dialect: user | reply | result. `calls` are (id, name, arguments as JSON)."""

    who: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""


class Clients:
    """The SDKs under one rollout's key; a connection that was closed while it idled is what they retry."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.openai = client.copy(max_retries=2)
        root = str(client.base_url).rstrip("/").removesuffix("/v1")
        self.anthropic = AsyncAnthropic(base_url=root, api_key=client.api_key, max_retries=2)

    async def chat(self, history: list[Said], stream: bool = False, leave: float = 0.0, **options: Any) -> list[Said]:
        asked: dict[str, Any] = {"model": "m", "messages": _chat(history), "tools": [TOOL], **options}
        if not stream:
            choices = (await self.openai.chat.completions.create(**asked)).choices
            return [_read_chat(choice.message) for choice in choices]
        async with self.openai.chat.completions.stream(**asked) as events:
            async for event in events:
                if leave and event.type == "content.delta" and event.delta:
                    return await _enough(leave)
            completion = await events.get_final_completion()
        return [_read_chat(choice.message) for choice in completion.choices]

    async def responses(self, history: list[Said], stream: bool = False, leave: float = 0.0, **options: Any) -> Any:
        function = {"type": "function", **TOOL["function"]}
        asked: dict[str, Any] = {"model": "m", "input": _items(history), "tools": [function], **options}
        if not stream:
            return [_read_response(await self.openai.responses.create(**asked))]
        async with self.openai.responses.stream(**asked) as events:
            async for event in events:
                if leave and event.type == "response.output_text.delta":
                    return await _enough(leave)
            return [_read_response(await events.get_final_response())]

    async def messages(self, history: list[Said], stream: bool = False, leave: float = 0.0, **options: Any) -> Any:
        function = TOOL["function"]
        tool = {"name": function["name"], "description": function["description"]}
        tool["input_schema"] = function["parameters"]
        asked: dict[str, Any] = {"model": "m", "max_tokens": 400, "messages": _blocks(history), "tools": [tool]}
        if not stream:
            return [_read_message(await self.anthropic.messages.create(**asked, **options))]
        async with self.anthropic.messages.stream(**asked, **options) as events:
            async for event in events:
                if leave and event.type == "content_block_delta":
                    return await _enough(leave)
            return [_read_message(await events.get_final_message())]

    async def sip(self, history: list[Said]) -> None:
        """Ask without a stream, read the beginning of the answer, and go."""
        url = self.openai.base_url
        asked = json.dumps({"model": "m", "messages": _chat(history), "tools": [TOOL]}).encode()
        with await asked_by_hand(url.host, url.port or 80, self.openai.api_key, asked) as socket:
            assert await asyncio.get_running_loop().sock_recv(socket, SIP)


async def asked_by_hand(host: str, port: int, key: str, body: bytes, header: str = "X: x") -> socket.socket:
    """A socket on which a chat completion has been asked for. What it holds is read when it is asked to, and no earlier."""
    loop, asking = asyncio.get_running_loop(), socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asking.setblocking(False)
    await loop.sock_connect(asking, (host, port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}"
        f"\r\n{header}"
    )
    await loop.sock_sendall(asking, f"{head}\r\n\r\n".encode() + body)
    return asking


async def _enough(think_s: float) -> list[Said]:
    """The agent thinks about what it has seen so far, and leaves."""
    await asyncio.sleep(think_s)
    return []


def _chat(history: list[Said]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for one in history:
        if one.who == "reply":
            calls = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": raw}}
                for i, name, raw in one.calls
            ]
            said.append({"role": "assistant", "content": one.text or None, **({"tool_calls": calls} if calls else {})})
        elif one.who == "result":
            said.append({"role": "tool", "tool_call_id": one.call_id, "content": one.text})
        else:
            said.append({"role": "user", "content": one.text})
    return said


def _items(history: list[Said]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for one in history:
        if one.who == "reply":
            if one.text or not one.calls:
                content = [{"type": "output_text", "text": one.text}]
                items.append({"type": "message", "role": "assistant", "content": content})
            items += [
                {"type": "function_call", "call_id": i, "name": name, "arguments": raw} for i, name, raw in one.calls
            ]
        elif one.who == "result":
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": one.text})
        else:
            items.append({"role": "user", "content": one.text})
    return items


def _blocks(history: list[Said]) -> list[dict[str, Any]]:
    """Results and what the user says after them are one message."""
    said: list[dict[str, Any]] = []
    for role, run in itertools.groupby(history, lambda one: "assistant" if one.who == "reply" else "user"):
        for one in run:
            text = [{"type": "text", "text": one.text}] if one.text else []
            if one.who == "reply":
                uses = [
                    {"type": "tool_use", "id": i, "name": name, "input": json.loads(raw)} for i, name, raw in one.calls
                ]
                said.append({"role": role, "content": [*text, *uses]})
            elif one.who == "user":
                said.append({"role": role, "content": text})
            else:
                said.append({"role": role, "content": [_result(one)]})
    return said


def _result(one: Said) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": one.call_id, "content": one.text}


def _read_chat(message: Any) -> Said:
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return Said("reply", message.content or "", tuple(calls))


def _read_response(response: Any) -> Said:
    calls = [(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"]
    return Said("reply", response.output_text, tuple(calls))


def _read_message(message: Any) -> Said:
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [(b.id, b.name, json.dumps(b.input)) for b in message.content if b.type == "tool_use"]
    return Said("reply", text, tuple(calls))


class AnyAgent:
    """`delivered` = the numbers of the samples it was given in full; every sample's text begins with its number.

    `leaving` is True while it asks for something that it will not stay for.
    """

    def __init__(self, client: AsyncOpenAI, begun: Callable[[], int]) -> None:
        self.clients = Clients(client)
        self.delivered: set[int] = set()
        self.leaving = False
        self._begun = begun
        self._histories: list[list[Said]] = [[Said("user", "start")]]

    async def step(self, what: str, dice: int) -> None:
        history = self._histories[dice % len(self._histories)]
        if what == "edit":
            at = dice // 7 % len(history)
            history = [*history[:at], replace(history[at], text=f"edited {dice % 3}"), *history[at + 1 :]]
        elif what == "compact":
            history = [Said("user", f"summary of {len(history)}")]
        elif what == "branch":
            history = [*history[: 1 + dice % len(history)], Said("user", "another way")]
        if what == "parallel":
            parts = [[Said("user", f"part {dice % 2}")] for _ in range(3)]
            await asyncio.gather(*(self._turn(part, "append", dice + i) for i, part in enumerate(parts)))
        else:
            await self._turn(history, what, dice)

    async def _turn(self, history: list[Said], what: str, dice: int) -> None:
        ask = (self.clients.chat, self.clients.responses, self.clients.messages)[dice % 3]
        options: dict[str, Any] = {"stream": bool(dice // 3 % 2)}
        if what == "n":
            ask, options = self.clients.chat, {**options, "n": 2}
        if what in ("cancel", "leave", "sip"):
            await self._left(ask, history, what, dice)
            if dice // 5 % 2:
                return
            options["stream"] = True
            options["extra_headers"] = RETRY
        replies = await ask(history, **options)
        self.delivered |= {number_of(reply) for reply in replies}
        if what == "retry":
            assert await ask(history, **{**options, "extra_headers": RETRY}) == replies
        self._histories += [[*history, reply, *self._answers(reply, dice)] for reply in replies]

    async def _left(self, ask: Dialect, history: list[Said], what: str, dice: int) -> None:
        """Ask and go: while it is sampled, in the middle of the text, at once or after a thought, or in the middle of a body."""
        before, self.leaving = self._begun(), True
        leave = {"leave": 1e-9 if dice % 2 else THINK_S}.get(what, 0.0)
        call = self.clients.sip(history) if what == "sip" else ask(history, stream=True, leave=leave)
        asking = asyncio.ensure_future(call)
        if what == "cancel":
            async with asyncio.timeout(10):
                while self._begun() == before and not asking.done():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            asking.cancel()
        await asyncio.wait({asking})
        self.leaving = False
        if not asking.cancelled():  # or it was the rest of an earlier answer, which came at once
            assert what == "cancel" or not asking.result()
            self.delivered |= {number_of(reply) for reply in asking.result() or ()}

    def _answers(self, reply: Said, dice: int) -> list[Said]:
        results = [Said("result", f"{dice % 9}", call_id=call[0]) for call in reply.calls]
        return (results[::-1] if dice % 2 else results) or [Said("user", f"go on {dice % 3}")]


def number_of(reply: Said) -> int:
    found = re.match(r"s(\d+)(?!\d)", reply.text)
    assert found is not None, reply
    return int(found[1])
