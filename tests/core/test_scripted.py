"""The scripted engine: what it records, and what pauses do to running and waiting requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl import EngineError, GenerationRequest, Reply, Sampling, ScriptedEngine, Span


def request(name: str = "r") -> GenerationRequest:
    return GenerationRequest((1, 2), Sampling(), request_id=name)


async def turns(n: int = 5) -> None:
    """Let everything that can run do so."""
    for _ in range(n):
        await asyncio.sleep(0)


async def test_replies_come_in_request_order_and_everything_is_recorded() -> None:
    engine = ScriptedEngine([Reply([1]), Reply([2, 3], logprobs=[-0.5, -1.0], versions=[4, 5], finish_reason="length")])
    first, second = await asyncio.gather(engine.generate(request("a")), engine.generate(request("b")))
    assert (first.token_ids, first.logprobs, first.version_spans) == ((1,), (0.0,), (Span(0, 0, 1),))
    assert second.version_spans == (Span(4, 0, 1), Span(5, 1, 2))
    assert (second.logprobs, second.finish_reason) == ((-0.5, -1.0), "length")
    await engine.pause("wait")
    await engine.update_weights("weights", 3)
    await engine.resume()
    assert [r.request_id for r in engine.requests] == ["a", "b"]
    assert engine.calls == [("generate", "a"), ("generate", "b"), ("pause", "wait"), ("update_weights", 3), ("resume",)]
    with pytest.raises(EngineError, match="2 replies"):
        await engine.generate(request())


async def test_a_script_may_be_a_plain_or_an_async_function() -> None:
    async def later(asked: GenerationRequest) -> Reply:
        await asyncio.sleep(0)
        return Reply([len(asked.token_ids)])

    for script in (later, lambda asked: Reply([len(asked.token_ids)])):
        assert (await ScriptedEngine(script).generate(request())).token_ids == (2,)


@pytest.mark.parametrize(("error", "kind"), [("lost", EngineError), (ValueError("x"), ValueError)])
async def test_errors_are_raised_and_leave_the_engine_idle(error: Any, kind: type[Exception]) -> None:
    engine = ScriptedEngine([Reply(error=error)])
    with pytest.raises(kind):
        await engine.generate(request())
    await asyncio.wait_for(engine.pause("wait"), 1)
    assert (await engine.health()).running == 0


async def test_keep_holds_back_what_runs_and_admits_nothing_until_resume() -> None:
    engine = ScriptedEngine([Reply([1], delay_s=0.01), Reply([2]), Reply([3])])
    running = asyncio.ensure_future(engine.generate(request("running")))
    await turns()
    await engine.pause("keep")
    waiting = [asyncio.ensure_future(engine.generate(request(f"waiting-{i}"))) for i in range(2)]
    await asyncio.sleep(0.03)
    health = await engine.health()
    assert (health.running, health.waiting, len(engine.requests)) == (1, 2, 1)
    assert not running.done()
    await engine.update_weights(None, 1)
    await turns()
    assert not running.done() and len(engine.requests) == 1
    await engine.resume()
    done = await asyncio.wait_for(asyncio.gather(running, *waiting), 1)
    assert [g.token_ids for g in done] == [(1,), (2,), (3,)]
    assert [g.version_spans[0].version for g in done] == [1, 1, 1]


async def test_resume_and_pause_at_once_admit_nothing_in_between() -> None:
    engine = ScriptedEngine([Reply([1]), Reply([2])])
    running = asyncio.ensure_future(engine.generate(request("first")))
    await turns()
    await running
    await engine.pause("keep")
    waiting = asyncio.ensure_future(engine.generate(request("second")))
    await turns()
    await engine.resume()
    await engine.pause("keep")
    await turns()
    assert len(engine.requests) == 1
    await engine.resume()
    assert (await asyncio.wait_for(waiting, 1)).token_ids == (2,)


async def test_wait_lets_what_runs_finish_and_holds_the_rest() -> None:
    engine = ScriptedEngine([Reply([1], delay_s=0.02), Reply([2])])
    running = asyncio.ensure_future(engine.generate(request("running")))
    await turns()
    pausing = asyncio.ensure_future(engine.pause("wait"))
    waiting = asyncio.ensure_future(engine.generate(request("waiting")))
    await turns()
    assert not pausing.done()
    await asyncio.wait_for(pausing, 1)
    assert running.done() and (await running).token_ids == (1,)
    await turns()
    assert not waiting.done() and len(engine.requests) == 1
    await engine.resume()
    assert (await waiting).token_ids == (2,)


async def test_abort_ends_what_runs_whatever_holds_it() -> None:
    async def never(asked: GenerationRequest) -> Reply:
        if asked.request_id == "script":
            await asyncio.Event().wait()
        return Reply([1], hang=asked.request_id == "hangs", delay_s=0.01 if asked.request_id == "kept" else 60.0)

    engine = ScriptedEngine(never)
    running = [asyncio.ensure_future(engine.generate(request(name))) for name in ("hangs", "slow", "script", "kept")]
    await turns()
    await engine.pause("keep")
    await asyncio.sleep(0.02)
    waiting = asyncio.ensure_future(engine.generate(request("waiting")))
    await asyncio.wait_for(engine.pause("abort"), 1)
    ended = await asyncio.gather(*running)
    assert {g.finish_reason for g in ended} == {"abort"}
    assert not waiting.done()
    await engine.resume()
    await turns()
    assert not waiting.done(), "an abort does not reach what came after it"
    waiting.cancel()


async def test_a_cancelled_request_is_forgotten() -> None:
    engine = ScriptedEngine([Reply(hang=True), Reply([1])])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(request()), 0.02)
    await asyncio.wait_for(engine.pause("wait"), 1)
    await engine.resume()
    assert (await engine.generate(request())).token_ids == (1,)


async def test_publishing_a_version_aborts_nothing() -> None:
    engine = ScriptedEngine(lambda asked: Reply([1, 2], delay_s=0.02))
    running = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(16)]
    await turns()
    await engine.pause("keep")
    await engine.update_weights(None, 1)
    await engine.resume()
    assert [g.finish_reason for g in await asyncio.gather(*running)] == ["stop"] * 16


async def test_tool_calls_are_parsed_from_hermes_blocks() -> None:
    content, (call,) = await ScriptedEngine([]).parse('hm <tool_call>{"name": "f", "arguments": {}}</tool_call>', [])
    assert (content, call.name, call.arguments) == ("hm", "f", {})
