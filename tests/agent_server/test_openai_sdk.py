"""An unmodified OpenAI SDK against the policy server, over a real port."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from agentrl.agent_server.http import READ_HERE
from PIL import Image as PILImage

from agentrl import AgentError, EngineError, Limits, Task
from agentrl.engines.placeholders import refusal
from agentrl.policy_pictures import _decoded

from .conftest import CALL, TOOL, Stage, until

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def test_a_conversation_is_one_row(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        for _ in range(3):
            reply = await client.chat.completions.create(model="any", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
            len(stage.engine.requests[2].token_ids),
            5,
        )
        return {"reward": 2, "score": 0.5, "metrics": {"steps": 3}}

    record = await stage.play(run, "one", "two", "three")
    assert stage.trained(record) == ["one|two|three"]
    assert (record.total_reward, record.score, record.metrics) == (2.0, 0.5, {"steps": 3.0})
    assert record.finish_reason == "stop" and not record.truncated


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called_and_answered(stage: Stage, stream: bool) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        messages: list[Any] = list(HI)
        options: dict[str, Any] = {"model": "m", "tools": [TOOL]}
        if stream:
            async with client.chat.completions.stream(messages=messages, **options) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(messages=messages, **options)
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I will add."
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"a": 1}'] * 2
        results = [{"role": "tool", "tool_call_id": c.id, "content": c.id} for c in choice.message.tool_calls]
        messages += [choice.message.model_dump(exclude_none=True, exclude={"parsed"}), *reversed(results)]
        await client.chat.completions.create(messages=messages, **options)

    record = await stage.play(run, f"I will add.{CALL}{CALL}", "done")
    assert stage.trained(record) == [f"I will add.{CALL}{CALL}|done"]
    assert "renderer/branches" not in record.metrics


async def test_streams_say_the_same_as_whole_replies(stage: Stage) -> None:
    text = "a text that is long enough to come in several pieces, " * 3

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}, n=2, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        for index in range(2):
            choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
            assert "".join(c.delta.content or "" for c in choices) == text and len(choices) > 4
            assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop"
            logprobs = [t for c in choices if c.logprobs for t in c.logprobs.content or []]
            assert "".join(t.token for t in logprobs) == f"{text}<|im_end|>" and logprobs[0].logprob == -0.5
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2 * len(logprobs)

    assert stage.trained(await stage.play(run, text, text)) == [text, text]


async def test_stop_strings_and_lengths(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        create = client.chat.completions.create
        reply = await create(model="m", messages=HI, stop=["END"], max_completion_tokens=50)
        assert reply.choices[0].message.content == "one "
        reply = await create(model="m", messages=HI, max_tokens=7)
        assert reply.choices[0].finish_reason == "length"

    record = await stage.play(run, "one END", ("two", {"finish_reason": "length"}))
    assert [request.sampling.max_new_tokens for request in stage.engine.requests] == [50, 7]
    assert stage.trained(record) == ["one END", "two"] and record.truncated


async def test_pictures_come_as_data_urls_alone(vision_stage: Stage) -> None:
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), "red").save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def shown(address: str) -> list[Any]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        messages = shown(url)
        for _ in range(2):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message, *shown(url)]
        for address in ("http://127.0.0.1/x.png", "/etc/passwd", "file:///etc/passwd", "data:image/png;base64,AAAA"):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=shown(address))

    record = await vision_stage.play(run, "red", "red")
    (row,) = record.rows()
    assert [count for _, _, count in row.images] == [4, 4] and len({sha for sha, _, _ in row.images}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_continued_by_items_or_by_id(stage: Stage, stream: bool) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]

    async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
        if not stream:
            return await client.responses.create(model="m", tools=[tool], **options)
        async with client.responses.stream(model="m", tools=[tool], **options) as events:
            kinds = [event.type async for event in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            return await events.get_final_response()

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        first = await ask(client, instructions="Be brief.", input="hi")
        call = first.output[1]
        assert first.output_text == "Adding." and (call.name, call.arguments) == ("add", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        items = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), result]
        second = await ask(client, instructions="Be brief.", input=items)
        assert second.output_text == "Two." and second.usage.output_tokens == len(stage.ids("Two.")) + 1
        third = await ask(client, instructions="Be brief.", input="more", previous_response_id=second.id)
        assert third.output_text == "Bye."

    assert stage.trained(await stage.play(run, f"Adding.{CALL}", "Two.", "Bye.")) == [f"Adding.{CALL}|Two.|Bye."]


async def test_rewards_can_be_posted(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await client.chat.completions.create(model="m", messages=HI)
        for reward in (0.5, 0.25):
            await client.post("/rollouts/self/reward", cast_to=object, body={"reward": reward, "metrics": {"m": 1}})
        with pytest.raises(openai.BadRequestError):
            await client.post("/rollouts/self/reward", cast_to=object, body={"rewards": 1})

    record = await stage.play(run, "one")
    assert record.total_reward == 0.75 and record.metrics["m"] == 1


# ---------------------------------------------------------------------- what goes wrong


async def test_after_the_end_there_is_one_request_and_410(stage: Stage) -> None:
    kept: list[openai.AsyncOpenAI] = []

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        kept.append(client)
        await client.chat.completions.create(model="m", messages=HI)
        await client.post("/rollouts/self/end", cast_to=object)
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="m", messages=HI)
        assert raised.value.status_code == 410 and raised.value.code == "rollout_ended"

    record = await stage.play(run, "one")
    assert record.metrics["policy/after_end"] == 1
    with pytest.raises(openai.APIStatusError) as raised:
        await kept[0].chat.completions.create(model="m", messages=HI)
    assert raised.value.status_code == 410 and raised.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.AuthenticationError) as unknown:
        await kept[0].copy(api_key="sk-rollout-guess").chat.completions.create(model="m", messages=HI)
    assert unknown.value.code == "invalid_api_key"
    assert len(stage.engine.requests) == 1


async def test_an_agent_that_runs_out_of_budget_ends_truncated(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await client.chat.completions.create(model="m", messages=HI)
        await client.post("/rollouts/self/reward", cast_to=object, body={"reward": 1})
        try:
            await client.chat.completions.create(model="m", messages=HI)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise

    record = await stage.play(run, "one", limits=Limits(max_turns=1, max_new_tokens=50))
    assert record.truncated and record.total_reward == 1.0 and stage.trained(record) == ["one"]


async def test_an_agent_that_raises_costs_its_episode(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        raise ValueError("lost my way")

    with pytest.raises(AgentError, match="ValueError: lost my way"):
        await stage.play(run)


async def test_an_engine_that_fails_is_retried_by_the_sdk_and_then_blamed(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await client.with_options(max_retries=1).chat.completions.create(model="m", messages=HI)

    with pytest.raises(EngineError, match="no luck"):
        await stage.play(run, *[("x", {"error": "no luck"})] * 2)
    assert len(stage.engine.requests) == 2
    assert stage.trained(await stage.play(run, ("x", {"error": "no luck"}), "one")) == ["one"]


async def test_a_request_that_the_engine_refuses_is_the_agents_fault_and_not_asked_again(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        bad: Any = {"type": "function", "function": {"name": "f", "parameters": 7}}
        with pytest.raises(openai.BadRequestError, match="parameters of tool f"):
            await client.chat.completions.create(model="m", messages=HI, tools=[bad])
        await client.chat.completions.create(model="m", messages=HI)

    with pytest.raises(AgentError, match="top_p must be"):
        await stage.play(run, ("x", {"error": refusal("top_p must be in (0, 1], got 5")}))
    assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_engine(stage: Stage, stream: bool) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        impatient = client.with_options(timeout=0.2, max_retries=0)
        if stream:
            events = await client.chat.completions.create(model="m", messages=HI, stream=True)
            async for _ in events:
                break
            await events.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await impatient.chat.completions.create(model="m", messages=HI)
        await until(lambda: not stage.engine._running)
        await client.chat.completions.create(model="m", messages=HI)

    record = await stage.play(run, ("never", {"hang": True}), "one")
    assert stage.trained(record) == ["one"] and record.metrics["policy/cancelled"] == 1


async def test_a_stream_that_is_left_half_way_is_not_trained(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        events = await client.chat.completions.create(model="m", messages=HI, stream=True)
        async for event in events:
            if event.choices[0].delta.content:
                break
        await events.close()

    record = await stage.play(run, "a reply of which only the beginning is ever read by anybody" * 4)
    assert record.rows() == [] and record.metrics["policy/undelivered"] == 1


async def test_the_sdks_retry_after_a_timeout_is_a_new_sample_of_what_was_cancelled(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        reply = await client.with_options(timeout=0.3).chat.completions.create(model="m", messages=HI)
        assert reply.choices[0].message.content == "one"

    assert stage.trained(await stage.play(run, ("never", {"hang": True}), "one")) == ["one"]


@pytest.mark.parametrize("sampling", ["force", "strict"])
async def test_other_sampling_is_overruled_or_refused(stage: Stage, sampling: Any) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await client.chat.completions.create(model="m", messages=HI, temperature=0.1)

    async def as_vllm_takes_it(task: Task, client: openai.AsyncOpenAI) -> Any:
        plain = {"repetition_penalty": 1.0, "min_tokens": 0, "top_k": -1, "ignore_eos": False}
        await client.chat.completions.create(model="m", messages=HI, extra_body=plain)
        for asked in ({"repetition_penalty": 1.2}, {"guided_choice": ["a"]}, {"chat_template_kwargs": {"think": 0}}):
            with pytest.raises(openai.BadRequestError, match=f"strict: {next(iter(asked))} = "):
                await client.chat.completions.create(model="m", messages=HI, extra_body=asked)

    if sampling == "strict":
        await stage.play(as_vllm_takes_it, "one", sampling="strict")
        with pytest.raises(AgentError, match="temperature"):
            await stage.play(run, "one", sampling="strict")
    else:
        await stage.play(run, "one")
        assert stage.engine.requests[0].sampling.temperature == 1.0


async def test_what_the_model_would_have_to_be_shown_from_elsewhere_is_refused(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        response = await client.responses.create(model="m", input=HI, metadata={"run": "7"})
        assert response.metadata == {"run": "7"}
        for asked in ({"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(asked))} is not served"):
                await client.responses.create(model="m", input=HI, **asked)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError, match="functions is not served"):
            await client.chat.completions.create(model="m", messages=HI, functions=[{"name": "f"}])

    await stage.play(run, "one")


async def test_models_and_tokens_are_told(stage: Stage) -> None:
    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        (model,) = [model async for model in client.models.list()]
        assert model.id == "policy" and (await client.models.retrieve("policy")).id == "policy"
        url = str(client.base_url).replace("/v1/", "/tokenize")
        counted: Any = await client.post(url, cast_to=object, body={"messages": HI})
        await client.chat.completions.create(model="m", messages=HI)
        assert tuple(counted["tokens"]) == stage.engine.requests[0].token_ids
        assert counted["count"] == len(counted["tokens"]) and counted["max_model_len"] == 4096
        plain: Any = await client.post(url, cast_to=object, body={"prompt": "the ans"})
        assert plain["tokens"] == stage.ids("the ans")

    await stage.play(run, "one")


async def test_pictures_are_read_off_the_event_loop_and_huge_ones_not_at_all(
    vision_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighty million pixels fit into 10 KB."""
    threads: set[int] = set()

    def decoded(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return _decoded(*given)

    def asked(picture: PILImage.Image) -> Any:
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await client.chat.completions.create(model="m", messages=asked(PILImage.new("RGB", (4, 4), "red")))
        with pytest.raises(openai.BadRequestError, match="9000x9000"):
            await client.chat.completions.create(model="m", messages=asked(PILImage.new("1", (9_000, 9_000))))

    monkeypatch.setattr("agentrl.policy_pictures._decoded", decoded)
    record = await vision_stage.play(run, "one")
    assert vision_stage.trained(record) == ["one"] and threads and threading.get_ident() not in threads


@pytest.mark.parametrize("large", [False, True])
async def test_agents_on_all_threads_of_the_event_loop_are_answered(vision_stage: Stage, large: bool) -> None:
    """A picture and a large body are read on threads too."""
    buffer = io.BytesIO()
    PILImage.new("RGB", (4, 4), "red").save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    content: Any = [{"type": "image_url", "image_url": {"url": url}}]
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    def blocking(base_url: str, key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=key, timeout=10, max_retries=0) as client:
            unread = {"extra_body": {"unread": "x" * READ_HERE}} if large else {}
            messages: Any = HI if large else [{"role": "user", "content": content}]
            client.chat.completions.create(model="m", messages=messages, **unread)

    async def run(task: Task, client: openai.AsyncOpenAI) -> Any:
        await asyncio.to_thread(blocking, str(client.base_url), client.api_key)

    assert vision_stage.trained(await vision_stage.play(run, "one")) == ["one"]
