"""An unmodified Anthropic SDK against the policy server, over a real port."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from PIL import Image as PILImage

from agentrl import Limits, Task

from .conftest import CALL, Stage, until

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_one_row(stage: Stage, stream: bool) -> None:
    async def ask(client: AsyncAnthropic, messages: list[Any]) -> Any:
        options: Any = {"model": "m", "max_tokens": 99, "system": "Be brief.", "tools": [TOOL], "messages": messages}
        if not stream:
            return await client.messages.create(**options)
        async with client.messages.stream(**options) as events:
            return await events.get_final_message()

    async def run(task: Task, client: AsyncAnthropic) -> Any:
        messages = list(HI)
        reply = await ask(client, messages)
        text, use = reply.content
        assert (text.text, use.name, use.input, reply.stop_reason) == ("Adding.", "add", {"a": 1}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "2"}]}
        messages += [{"role": "assistant", "content": reply.content}]
        messages += [{"role": "user", "content": [result, {"type": "text", "text": "Now?"}]}]
        reply = await ask(client, messages)
        assert reply.content[0].text == "Two." and reply.stop_reason == "end_turn"
        assert reply.usage.input_tokens == len(stage.engine.requests[1].token_ids)
        assert reply.usage.output_tokens == len(stage.ids("Two.")) + 1
        return 1

    record = await stage.play(run, f"Adding.{CALL}", "Two.")
    assert stage.trained(record) == [f"Adding.{CALL}|Two."] and record.total_reward == 1.0


@beta_async_tool
async def add(a: int) -> str:
    """Adds."""
    return str(a + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_loop_sends_new_messages_alone_and_is_one_row(stage: Stage, stream: bool) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        options: Any = {"model": "m", "max_tokens": 99, "system": "Be brief.", "tools": [add], "stream": stream}
        runner: Any = client.beta.messages.tool_runner(messages=HI, **options)
        assert (await runner.until_done()).content[0].text == "Three."

    record = await stage.play(run, f"Adding.{CALL}", f"Again.{CALL}", "Three.")
    assert stage.trained(record) == [f"Adding.{CALL}|Again.{CALL}|Three."]
    assert [message["role"] for message in record.messages].count("system") == 1


async def test_a_thread_goes_on_from_a_reply_of_this_rollout(stage: Stage) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        ask: Any = client.beta.messages.create
        first = await ask(model="m", max_tokens=9, messages=HI, thread={"type": "create"})
        going_on = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "more"}]}
        thread = {"type": "continue", "previous_message_id": first.id}
        for _ in range(2):
            await ask(**going_on, thread=thread)
        with pytest.raises(anthropic.BadRequestError, match="began with"):
            await ask(**going_on, system="Shout.", thread=thread)
        with pytest.raises(anthropic.NotFoundError) as raised:
            await ask(**going_on, thread={**thread, "previous_message_id": "msg_of_another"})
        assert raised.value.error_code == "thread_not_found"
        for asked in ({"mcp_servers": [{"type": "url", "url": "http://h", "name": "n"}]}, {"compaction": {}}):
            with pytest.raises(anthropic.BadRequestError, match="is not served"):
                await ask(**going_on, extra_body={**asked, "container": "c"})

    assert sorted(stage.trained(await stage.play(run, "one", "two", "three"))) == ["one|two", "three"]


async def test_calls_that_are_no_objects_are_text(stage: Stage) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        reply = await client.messages.create(model="m", max_tokens=99, tools=[TOOL], messages=HI)
        assert [block.type for block in reply.content] == ["text"] and reply.stop_reason == "end_turn"
        messages = [*HI, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "again"}]
        await client.messages.create(model="m", max_tokens=99, tools=[TOOL], messages=messages)

    broken = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'
    assert stage.trained(await stage.play(run, broken, "two")) == [f"{broken}|two"]


async def test_a_number_that_json_has_no_word_for(stage: Stage) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        reply = await client.messages.create(model="m", max_tokens=99, tools=[TOOL], messages=HI)
        assert reply.content[0].input == {"a": None, "b": [1]}

    await stage.play(run, '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": [1]}}</tool_call>')


async def test_stop_sequences_lengths_and_empty_replies(stage: Stage) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        create = client.messages.create
        reply = await create(model="m", max_tokens=99, messages=HI, stop_sequences=["END"])
        assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "END", "one ")
        assert (await create(model="m", max_tokens=5, messages=HI)).stop_reason == "max_tokens"
        assert (await create(model="m", max_tokens=5, messages=HI)).content == []
        count = await client.messages.count_tokens(model="m", messages=HI)
        assert count.input_tokens == len(stage.engine.requests[1].token_ids)

    await stage.play(run, "one END two", ("two", {"finish_reason": "length"}), "")
    assert [request.sampling.max_new_tokens for request in stage.engine.requests] == [99, 5, 5]


async def test_pictures_in_messages_and_in_results(vision_stage: Stage) -> None:
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), "red").save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    async def run(task: Task, client: AsyncAnthropic) -> Any:
        messages: list[Any] = [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]
        reply = await client.messages.create(model="m", max_tokens=9, messages=messages)
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [picture]}]
        await client.messages.create(model="m", max_tokens=9, messages=messages)
        remote = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
        with pytest.raises(anthropic.BadRequestError):
            messages = [{"role": "user", "content": [remote]}]
            await client.messages.create(model="m", max_tokens=9, messages=messages)

    (row,) = (await vision_stage.play(run, "red", "red")).rows()
    assert [count for _, _, count in row.images] == [4, 4]


async def test_errors_have_the_vendors_shape(stage: Stage) -> None:
    kept: list[AsyncAnthropic] = []

    async def run(task: Task, client: AsyncAnthropic) -> Any:
        kept.append(client)
        await client.messages.create(model="m", max_tokens=9, messages=HI)
        with pytest.raises(anthropic.BadRequestError) as raised:
            await client.messages.create(model="m", max_tokens=9, messages=HI)
        body: Any = raised.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert "context_length_exceeded" in body["error"]["message"]
        assert raised.value.error_code == "context_length_exceeded"

    await stage.play(run, "one", limits=Limits(max_turns=1, max_new_tokens=50))
    with pytest.raises(anthropic.APIStatusError) as late:
        await kept[0].messages.create(model="m", max_tokens=9, messages=HI)
    assert late.value.status_code == 410
    with pytest.raises(anthropic.AuthenticationError):
        await kept[0].copy(api_key="guess").messages.create(model="m", max_tokens=9, messages=HI)
    assert len(stage.engine.requests) == 1


async def test_a_stream_that_is_left_cancels_the_engine(stage: Stage) -> None:
    async def run(task: Task, client: AsyncAnthropic) -> Any:
        async with client.messages.stream(model="m", max_tokens=9, messages=HI) as events:
            async for event in events:
                assert event.type == "message_start"
                break
        await until(lambda: not stage.engine._running)
        async with client.messages.stream(model="m", max_tokens=9, messages=HI) as events:
            assert await events.get_final_text() == "one"

    record = await stage.play(run, ("never", {"hang": True}), "one")
    assert stage.trained(record) == ["one"] and record.metrics["policy/cancelled"] == 1
