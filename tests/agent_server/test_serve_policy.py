"""`agentrl serve policy`: a model for use; every request is on its own and is sampled as it asks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agentrl.agent_server.listen import bind, listening

from agentrl import Limits
from agentrl.cli.serve_policy import ServePolicyCommand, policy_for_use
from agentrl.config import Config
from agentrl.config.load import parse_command
from agentrl.preflight import EnvFacts, Ready

from .conftest import Stage

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(stage: Stage) -> Callable[..., Any]:
    """async with served("said", token=…) as url"""

    @asynccontextmanager
    async def start(*says: Any, token: str | None = None) -> AsyncIterator[str]:
        stage.says = list(says)
        limits = Limits(max_turns=128, max_new_tokens=300, max_len=300, max_total_tokens=38400)
        ready = Ready(Config(), "/models/mine", {}, (), EnvFacts(None), limits, ())
        app = policy_for_use(ServePolicyCommand(), ready, stage.engine, stage.renderer, token)
        async with listening(app, bind("127.0.0.1", 0), "off") as url:
            yield url

    return start


async def test_requests_are_sampled_as_they_ask(stage: Stage, served: Any) -> None:
    async with served("one", "two", "two", "three") as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        (model,) = [model async for model in client.models.list()]
        assert model.id == "mine"
        reply = await client.chat.completions.create(model="mine", messages=HI, temperature=0, top_p=0.9)
        assert reply.choices[0].message.content == "one"
        for _ in range(2):
            await client.chat.completions.create(model="mine", messages=HI, max_tokens=7, seed=5, stop="x")
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none")
        message: Any = await claude.messages.create(model="mine", messages=HI, max_tokens=9, extra_body={"top_k": 4})
        assert message.content[0].text == "three"
        for unsupported in ({"presence_penalty": 1.0}, {"logit_bias": {"5": 1}}, {"temperature": -1}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="mine", messages=HI, **unsupported)
    first, second, third, fourth = (request.sampling for request in stage.engine.requests)
    room = 300 - len(stage.engine.requests[0].token_ids)
    assert (first.temperature, first.top_p, first.max_new_tokens) == (0, 0.9, room)
    assert (second.temperature, second.max_new_tokens, second.stop) == (1.0, 7, ("x",))
    assert second.seed == third.seed != first.seed
    assert fourth.top_k == 4


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_a_format_goes_to_the_engine_in_every_dialect(stage: Stage, served: Any) -> None:
    async with served("{}", "{}", "{}", "{}", "plain") as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        chat: Any = client.chat.completions
        await chat.create(model="m", messages=HI, response_format={"type": "json_object"})
        named = {"name": "n", "schema": SCHEMA}
        await chat.create(model="m", messages=HI, response_format={"type": "json_schema", "json_schema": named})
        responses: Any = client.responses
        await responses.create(model="m", input="hi", text={"format": {"type": "json_schema", **named}})
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none")
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        await claude.messages.create(model="m", messages=HI, max_tokens=9, output_config=form)
        await chat.create(model="m", messages=HI, response_format={"type": "text"})
        for wrong in (
            {"type": "grammar"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": 3}},
        ):
            with pytest.raises(openai.BadRequestError, match="response format"):
                await chat.create(model="m", messages=HI, response_format=wrong)
    asked = [request.sampling.json_schema for request in stage.engine.requests]
    assert [text and json.loads(text) for text in asked] == [{"type": "object"}, SCHEMA, SCHEMA, SCHEMA, None]


async def test_equal_requests_are_samples_of_their_own_and_there_is_no_rollout(stage: Stage, served: Any) -> None:
    async with served("one", "two") as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        said = [await client.chat.completions.create(model="m", messages=HI) for _ in range(2)]
        assert [reply.choices[0].message.content for reply in said] == ["one", "two"]
        responses: Any = client.responses
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await responses.create(model="m", input="more", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await client.post("/rollouts/self/reward", cast_to=object, body={"reward": 1})


async def test_a_thread_is_sent_whole_where_none_is_kept(stage: Stage, served: Any) -> None:
    async with served("one", "two") as url:
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none")
        thread: Any = claude.beta.messages.thread(model="mine", max_tokens=9)
        said = [await thread.send({"role": "user", "content": text}) for text in ("hi", "more")]
        assert [message.content[0].text for message in said] == ["one", "two"]
    texts = [stage.tokenizer.decode(request.token_ids) for request in stage.engine.requests]
    assert "one" in texts[1] and texts[1].startswith(texts[0])


async def test_a_token_is_the_api_key(served: Any) -> None:
    async with served("one", token="sesame") as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="guess")
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.chat.completions.create(model="m", messages=HI)
        assert raised.value.code == "invalid_api_key"
        with pytest.raises(anthropic.AuthenticationError):
            await anthropic.AsyncAnthropic(base_url=url, api_key="guess").models.list()
        reply = await client.copy(api_key="sesame").chat.completions.create(model="m", messages=HI)
        assert reply.choices[0].message.content == "one"


@pytest.mark.parametrize(
    "flag", ["count=2", "colocated", "model=m", "token-file=f", "transport=shm", "update-timeout-s=3", "max-restarts=1"]
)
def test_what_one_engine_that_learns_nothing_does_not_use_is_no_flag(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_command(ServePolicyCommand, [f"--engine.{flag}"], prog="agentrl serve policy", description="")
    assert raised.value.code == 2 and f"Unrecognized options: --engine.{flag}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    from agentrl.trainers.tiny import make_tiny

    model = make_tiny("tiny-text", tmp_path / "tiny", max_steps=0)
    code = "import sys; from agentrl.cli.main import run; sys.exit(run(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "serve",
        "policy",
        "--engine",
        "random",
        "--port",
        "0",
        "--model",
        str(model),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("listening on")).split()[-1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        reply = client.chat.completions.create(model="tiny", messages=HI, max_tokens=4)
        assert reply.usage is not None and 0 < reply.usage.completion_tokens <= 4
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip().endswith("agentrl: Interrupted."), err
